"""The CPU backend's side of each op: check the tensors, then hand addresses and sizes to the native unit."""

from __future__ import annotations

import numpy as np

from quire.core.dtypes import F32, I32, I64, U8
from quire.ops.arrays import Host, address, byte_strides
from quire.ops.attention_spec import AttentionSpec
from quire.ops.cpu.descriptor_cache import (
    Paged,
    attention_descriptor,
    batch_descriptor,
    blocks_of,
    cache_descriptor,
    rope_descriptor,
)
from quire.ops.cpu.pack_stored import file_format
from quire.ops.cpu.state import ACTIVATION_NUMBERS, TABLE_NUMBERS, Cpu
from quire.ops.facts import MAX_HEAD_DIM
from quire.ops.kinds import KINDS
from quire.ops.layout import KVCache, KVLayout
from quire.ops.native import check
from quire.ops.op import impl
from quire.ops.weights import Packed, PackedTable, PieceTable, StoredTable


@impl("embedding", "cpu")
def embedding(
    cpu: Cpu, tokens: Host, table: Host | PackedTable | StoredTable | PieceTable, first: int | None = None
) -> Host:
    rows = len(check(tokens, "embedding tokens", I32, -1))
    if isinstance(table, PieceTable):
        return _rows_of_pieces(cpu, tokens, rows, table)
    if isinstance(table, PackedTable):
        return _packed_rows(cpu, tokens, rows, table, first)
    if isinstance(table, StoredTable):
        return _stored_rows(cpu, tokens, rows, table, first)
    vocabulary, d = check(table, "embedding table", table.dtype if table.dtype in TABLE_NUMBERS else F32, -1, -1).shape
    out = cpu.arena.empty(rows, d)
    if rows:
        where, numbers = (out, tokens, table), TABLE_NUMBERS[table.dtype]
        cpu.call("embedding", *where, rows, d, vocabulary, numbers, -1 if first is None else first)
    return out


def _packed_rows(cpu: Cpu, tokens: Host, rows: int, table: PackedTable, first: int | None) -> Host:
    out = cpu.arena.empty(rows, table.matrix.k)
    if rows:
        begin = -1 if first is None else first
        cpu.call("embedding_packed", out, tokens, table.matrix.handle, rows, int(table.rounded), begin)
    return out


def _rows_of_pieces(cpu: Cpu, tokens: Host, rows: int, table: PieceTable) -> Host:
    piece, count = table.pieces[0], len(table.pieces)
    each, d = check(piece, "embedding piece", piece.dtype if piece.dtype in TABLE_NUMBERS else F32, -1, -1).shape
    check(table.addresses, "embedding addresses", I64, count)
    out = cpu.arena.empty(rows, d)
    if rows:
        where, numbers = (out, tokens, table.addresses), TABLE_NUMBERS[piece.dtype]
        cpu.call("embedding_pieces", *where, rows, d, table.rows, each, numbers)
    return out


def _stored_rows(cpu: Cpu, tokens: Host, rows: int, table: StoredTable, first: int | None) -> Host:
    vocabulary, stride = check(table.data, "embedding table", U8, -1, -1).shape
    out = cpu.arena.empty(rows, table.k)
    if rows:
        name, number = file_format(table.form)
        begin, sizes = -1 if first is None else first, (rows, table.k, vocabulary, stride)
        cpu.call(f"embedding_{name}", out, tokens, table.data, *sizes, number, table.numbers, begin)
    return out


@impl("rmsnorm", "cpu")
def rmsnorm(cpu: Cpu, x: Host, weight: Host, eps: float) -> Host:
    rows, d = check(x, "rmsnorm x", F32, -1, -1).shape
    check(weight, "rmsnorm weight", F32, d)
    out = cpu.arena.empty(rows, d)
    if rows:
        cpu.call("rmsnorm", out, x, weight, rows, d, eps)
    return out


@impl("add_rmsnorm", "cpu")
def add_rmsnorm(cpu: Cpu, x: Host, delta: Host, weight: Host, eps: float) -> tuple[Host, Host]:
    rows, d = check(x, "add_rmsnorm x", F32, -1, -1).shape
    check(delta, "add_rmsnorm delta", F32, rows, d)
    check(weight, "add_rmsnorm weight", F32, d)
    out = cpu.arena.empty(rows, d)
    if rows:
        cpu.call("add_rmsnorm", out, x, delta, weight, rows, d, eps)
    return x, out


@impl("linear", "cpu")
def linear(cpu: Cpu, x: Host, w: Packed, bias: Host | None) -> Host:
    rows = check(x, "linear x", F32, -1, w.k).shape[0]
    if bias is not None:
        check(bias, "linear bias", F32, w.n)
    out = cpu.arena.empty(rows, w.n)
    if rows:
        cpu.call("linear", out, x, w.handle, bias, rows)
    return out


@impl("rope_and_cache", "cpu")
def rope_and_cache(
    cpu: Cpu,
    qkv: Host,
    positions: Host,
    table: Host,
    slots: Host,
    cache: KVCache,
    norms: tuple[Host, Host] | None,
    eps: float,
) -> Host:
    rows, width = check(qkv, "rope_and_cache qkv", F32, -1, -1).shape
    check(positions, "rope_and_cache positions", I32, rows)
    check(slots, "rope_and_cache slots", I64, rows)
    check(table, "rope_and_cache table", F32, -1, 2, -1)
    layout, at_cache = cache.layout, cache_descriptor(cpu, cache)
    heads = _heads(width, layout)
    if 2 * table.shape[2] > layout.head_dim:
        raise ValueError(f"rope_and_cache table: {2 * table.shape[2]} dimensions do not fit head_dim {layout.head_dim}")
    for norm in norms or ():
        check(norm, "rope_and_cache norm", F32, layout.head_dim)
    if rows:
        rope = rope_descriptor(table, heads, norms or (None, None), eps)
        cpu.call("rope_and_cache", qkv, positions, slots, at_cache, rope, rows)
    return qkv


@impl("attention", "cpu")
def attention(
    cpu: Cpu,
    qkv: Host,
    cache: KVCache,
    cu_q: Host,
    context: Host,
    block_tables: Host,
    spec: AttentionSpec,
    tree: Host | None = None,
) -> Host:
    return run_attention(cpu, qkv, cache, (cu_q, context, block_tables), spec, tree)


def run_attention(
    cpu: Cpu,
    qkv: Host,
    cache: KVCache,
    paged: Paged,
    spec: AttentionSpec,
    tree: Host | None = None,
    starts: Host | None = None,
) -> Host:
    """The op `attention`, or, with `starts`, `attention_states`."""
    rows, width = check(qkv, "attention qkv", F32, -1, -1).shape
    heads, d = _heads(width, cache.layout), cache.layout.head_dim
    if tree is not None:
        check(tree, "attention tree", I64, rows)
    states = 0 if starts is None else int(starts[-1])
    out = cpu.arena.empty(*((rows, heads * d) if starts is None else (states, heads * (d + 2))))
    at_cache, batch = cache_descriptor(cpu, cache), batch_descriptor(cpu, "attention", paged, tree, starts, states)
    at_spec = attention_descriptor(cpu, spec, heads)
    if out.size:
        cpu.call("attention", out, qkv, at_cache, batch, at_spec, rows)
    return out


@impl("gated_activation", "cpu")
def gated_activation(cpu: Cpu, gate_up: Host, kind: str) -> Host:
    rows, width = check(gate_up, "gated_activation gate_up", F32, -1, -1).shape
    if width % 2:
        raise ValueError(f"gated_activation: {width} columns are not a gate and an up part of one size")
    out = cpu.arena.empty(rows, width // 2)
    if rows:
        cpu.call("gated_activation", out, gate_up, rows, width // 2, ACTIVATION_NUMBERS[kind])
    return out


@impl("activation", "cpu")
def activation(cpu: Cpu, x: Host, kind: str) -> Host:
    rows, width = check(x, "activation x", F32, -1, -1).shape
    out = cpu.arena.empty(rows, width)
    if rows:
        cpu.call("activation", out, x, rows, width, ACTIVATION_NUMBERS[kind])
    return out


@impl("gated_mlp", "cpu")
def gated_mlp(
    cpu: Cpu,
    x: Host,
    gate_up: Packed,
    gate_up_bias: Host | None,
    down: Packed,
    down_bias: Host | None,
    kind: str,
) -> Host:
    return _mlp(cpu, "gated_mlp", x, (gate_up, gate_up_bias), (down, down_bias), kind)


@impl("plain_mlp", "cpu")
def plain_mlp(
    cpu: Cpu,
    x: Host,
    up: Packed,
    up_bias: Host | None,
    down: Packed,
    down_bias: Host | None,
    kind: str,
) -> Host:
    return _mlp(cpu, "plain_mlp", x, (up, up_bias), (down, down_bias), kind)


Biased = tuple[Packed, Host | None]


def _mlp(cpu: Cpu, name: str, x: Host, first: Biased, second: Biased, kind: str) -> Host:
    (up, up_bias), (down, down_bias) = first, second
    rows = check(x, f"{name} x", F32, -1, up.k).shape[0]
    if up.n != (2 if name == "gated_mlp" else 1) * down.k or down.n != up.k:
        raise ValueError(f"{name}: matrices [{up.n}, {up.k}] and [{down.n}, {down.k}] do not fit")
    if up_bias is not None:
        check(up_bias, f"{name} bias", F32, up.n)
    if down_bias is not None:
        check(down_bias, f"{name} bias", F32, down.n)
    out = cpu.arena.empty(rows, down.n)
    if rows:
        cpu.call(
            name, out, x, up.handle, up_bias,
            down.handle, down_bias, rows, ACTIVATION_NUMBERS[kind],
        )  # fmt: skip
    return out


def fuses_mlp(gate_up: Packed, down: Packed) -> bool:
    """Whether the native `gated_mlp` and `plain_mlp` take these: no tables, columns in order, int8 activations."""
    return down.k % 16 == 0 and all(_fuses(w) for w in (gate_up, down))


def _fuses(w: Packed) -> bool:
    return KINDS[w.kind].fuses and w.handle.order == 0 and w.handle.digits == 1


@impl("take_rows", "cpu")
def take_rows(cpu: Cpu, x: Host, delta: Host, rows: Host | None) -> Host:
    return _rows_of(cpu, "take_rows", x, delta, rows)


@impl("pick_rows", "cpu")
def pick_rows(cpu: Cpu, x: Host, rows: Host) -> Host:
    return _rows_of(cpu, "pick_rows", x, None, rows)


def _rows_of(cpu: Cpu, name: str, x: Host, delta: Host | None, rows: Host | None) -> Host:
    total, d = check(x, f"{name} x", F32, -1, -1).shape
    at_delta = None if delta is None else check(delta, f"{name} delta", F32, total, d)
    at_rows = None if rows is None else check(rows, f"{name} rows", I32, -1)
    count = total if rows is None else len(rows)
    out = cpu.arena.empty(count, d)
    if count:
        cpu.call("take_rows", out, x, at_delta, at_rows, count, d, total)
    return out


@impl("copy_blocks", "cpu")
def copy_blocks(cpu: Cpu, caches: list[KVCache], pairs: tuple[tuple[int, int], ...]) -> None:
    if not pairs or not caches:
        return
    flat = check(np.array(pairs, I64), "copy_blocks pairs", I64, -1, 2)
    where, blocks = _block_table(caches)
    cpu.call("copy_blocks", where, len(where), flat, len(pairs), blocks)


@impl("move_slots", "cpu")
def move_slots(cpu: Cpu, caches: list[KVCache], pairs: tuple[tuple[int, int], ...]) -> None:
    if not pairs or not caches:
        return
    flat = check(np.array(pairs, I64), "move_slots pairs", I64, -1, 2)
    blocks, size = min(map(blocks_of, caches)), caches[0].layout.block_size
    if any(cache.layout.block_size != size for cache in caches):
        raise ValueError("move_slots: the caches' blocks are of several sizes")
    where = np.array([row for cache in caches for row in _token_rows(cache)], I64)
    cpu.call("move_slots", where, len(where), flat, len(pairs), blocks, size)


def _token_rows(cache: KVCache) -> list[tuple[int, ...]]:
    """How tokens lie in keys and in values, as csrc/blocks.cpp reads it."""
    at, width = cache.layout, cache.layout.dtype.itemsize
    head = byte_strides(cache.keys)[1]
    return [
        (address(t), cache.step, at.kv_heads, head, at.head_dim * width, side, word, at.scaled)
        for t, side, word in ((cache.keys, at.lanes, at.pair * width), (cache.values, at.vpair, width))
    ]


@impl("zero_blocks", "cpu")
def zero_blocks(cpu: Cpu, caches: list[KVCache], blocks: tuple[int, ...]) -> None:
    if not blocks or not caches:
        return
    flat = check(np.array(blocks, I64), "zero_blocks blocks", I64, -1)
    where, total = _block_table(caches)
    cpu.call("zero_blocks", where, len(where), flat, len(blocks), total)


def _block_table(caches: list[KVCache]) -> tuple[Host, int]:
    """(address, bytes of a block) of every key and value cache, and the smallest number of blocks."""
    blocks = min(map(blocks_of, caches))
    tensors = [t for cache in caches for t in cache.arrays]
    rows = [(address(t), byte_strides(t)[0]) for t in tensors]
    return np.array(rows, I64), blocks


def _heads(width: int, layout: KVLayout) -> int:
    """Query heads of a qkv row of `width` numbers."""
    heads, rest = divmod(width, layout.head_dim)
    heads -= 2 * layout.kv_heads
    if rest or heads < 1 or heads % layout.kv_heads or layout.head_dim % 8 or layout.head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"qkv of {width} columns is not (heads + 2 * {layout.kv_heads}) * {layout.head_dim} with heads a multiple "
            f"of kv_heads and head_dim a multiple of 8 up to {MAX_HEAD_DIM}"
        )
    return heads
