"""The CPU backend's side of each op: check the tensors, then hand addresses and sizes to the native unit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.ops.arena import Arena
from quire.ops.attention_spec import AttentionSpec
from quire.ops.kinds import KINDS
from quire.ops.layout import KVCache, KVLayout
from quire.ops.native import Native
from quire.ops.op import impl
from quire.ops.reference import ACTIVATIONS
from quire.ops.weights import Packed

ACTIVATION_NUMBERS = {name: index for index, name in enumerate(ACTIVATIONS)}
"""Numbers of the activations in csrc/units/elementwise.h."""


class Cpu:
    """What the implementations below share: the native unit, the arena of outputs, what a recording keeps alive.

    `bf16_bits` 12: bf16 matrices may be packed in 12 bits, without loss. `sparse`: which matrices lose their zeros, as
    `--sparse` says.
    """

    def __init__(self, native: Native, bf16_bits: int = 16, sparse: str = "auto") -> None:
        self.native = native
        self.bf16_bits, self.sparse = bf16_bits, sparse
        self.call = native.call
        self.arena = Arena(native)
        self.held: list[Any] = []

    def hold(self, *objects: Any) -> None:
        """Keep `objects` alive as long as the recording that is open, if one is."""
        if self.native.recording is not None:
            self.held.extend(objects)


def check(x: Tensor, what: str, dtype: torch.dtype, *shape: int) -> Tensor:
    """`x` itself when it is contiguous and of that dtype and shape (-1: any size); a ValueError names what is not."""
    if x.dtype is dtype and x.is_contiguous() and x.dim() == len(shape):
        for have, want in zip(x.shape, shape, strict=True):
            if want not in (-1, have):
                break
        else:
            return x
    raise ValueError(
        f"{what}: need a contiguous {dtype} tensor of shape {list(shape)}, got {x.dtype} {list(x.shape)}"
        f"{'' if x.is_contiguous() else ', not contiguous'}"
    )


F32, I32, I64, BF16 = torch.float32, torch.int32, torch.int64, torch.bfloat16
TABLES = (torch.float32, torch.bfloat16, torch.float16)
"""Numbers of the dtypes of tables in csrc/units/elementwise.h."""


@impl("rmsnorm", "cpu")
def rmsnorm(cpu: Cpu, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, d = check(x, "rmsnorm x", F32, -1, -1).shape
    check(weight, "rmsnorm weight", F32, d)
    out = cpu.arena.empty(rows, d)
    if rows:
        cpu.call("rmsnorm", out.data_ptr(), x.data_ptr(), weight.data_ptr(), rows, d, eps)
    return out


@impl("add_rmsnorm", "cpu")
def add_rmsnorm(cpu: Cpu, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows, d = check(x, "add_rmsnorm x", F32, -1, -1).shape
    check(delta, "add_rmsnorm delta", F32, rows, d)
    check(weight, "add_rmsnorm weight", F32, d)
    out = cpu.arena.empty(rows, d)
    if rows:
        cpu.call("add_rmsnorm", out.data_ptr(), x.data_ptr(), delta.data_ptr(), weight.data_ptr(), rows, d, eps)
    return x, out


@impl("linear", "cpu")
def linear(cpu: Cpu, x: Tensor, w: Packed, bias: Tensor | None) -> Tensor:
    rows = check(x, "linear x", F32, -1, w.k).shape[0]
    if bias is not None:
        check(bias, "linear bias", F32, w.n)
    out = cpu.arena.empty(rows, w.n)
    if rows:
        at_bias = 0 if bias is None else bias.data_ptr()
        cpu.call("linear", out.data_ptr(), x.data_ptr(), w.handle.at, at_bias, rows)
    return out


@impl("rope_and_cache", "cpu")
def rope_and_cache(
    cpu: Cpu,
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    slots: Tensor,
    cache: KVCache,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    rows, width = check(qkv, "rope_and_cache qkv", F32, -1, -1).shape
    check(positions, "rope_and_cache positions", I32, rows)
    check(slots, "rope_and_cache slots", I64, rows)
    check(table, "rope_and_cache table", F32, -1, 2, -1)
    layout = cache.layout
    blocks, at_cache = cache_at(cache)
    heads = _heads(width, layout)
    if 2 * table.shape[2] > layout.head_dim:
        raise ValueError(f"rope_and_cache table: {2 * table.shape[2]} dimensions do not fit head_dim {layout.head_dim}")
    at_norms = (0, 0)
    if norms is not None:
        for norm in norms:
            check(norm, "rope_and_cache norm", F32, layout.head_dim)
        at_norms = (norms[0].data_ptr(), norms[1].data_ptr())
    if rows:
        cpu.call(
            "rope_and_cache", qkv.data_ptr(), positions.data_ptr(), table.data_ptr(), slots.data_ptr(), *at_cache,
            *at_norms, rows, heads, layout.kv_heads, layout.head_dim, table.shape[2], table.shape[0],
            layout.block_size, blocks, layout.format, cache.step, eps,
        )  # fmt: skip
    return qkv


@impl("attention", "cpu")
def attention(
    cpu: Cpu,
    qkv: Tensor,
    cache: KVCache,
    cu_q: Tensor,
    context: Tensor,
    block_tables: Tensor,
    spec: AttentionSpec,
    tree: Tensor | None = None,
) -> Tensor:
    return run_attention(cpu, qkv, cache, (cu_q, context, block_tables), spec, tree)


def run_attention(
    cpu: Cpu,
    qkv: Tensor,
    cache: KVCache,
    paged: tuple[Tensor, Tensor, Tensor],
    spec: AttentionSpec,
    tree: Tensor | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """The op `attention`, or, with `starts`, `attention_states`. `paged`: cu_q, context and block tables."""
    rows, width = check(qkv, "attention qkv", F32, -1, -1).shape
    heads = _heads(width, cache.layout)
    for name, numbers in (("sinks", spec.sinks), ("alibi", spec.alibi)):
        if numbers is not None:
            check(numbers, f"attention {name}", F32, heads)
    distances = 0 if spec.bias is None else check(spec.bias, "attention bias", F32, heads, -1).shape[1]
    if spec.bias is not None and not distances:
        raise ValueError("attention bias: needs at least one distance")
    if tree is not None:
        check(tree, "attention tree", I64, rows)
    states, d = 0 if starts is None else int(starts[-1]), cache.layout.head_dim
    out = cpu.arena.empty(*((rows, heads * d) if starts is None else (states, heads * (d + 2))))
    rest = (
        spec.window, spec.scale, spec.softcap,
        *(0 if t is None else t.data_ptr() for t in (spec.sinks, spec.alibi, spec.bias)), distances,
        *(0 if t is None else t.data_ptr() for t in (tree, starts)), states, 0,
    )  # fmt: skip
    return call_attention(cpu, out, qkv, cache, paged, heads, rest)


def call_attention(
    cpu: Cpu,
    out: Tensor,
    q: Tensor,
    cache: KVCache,
    paged: tuple[Tensor, Tensor, Tensor],
    heads: int,
    rest: tuple[float, ...],
) -> Tensor:
    """The native op; `paged`: cu_q, context and block tables, `rest`: its arguments behind the format of the cache."""
    cu_q, context, block_tables = paged
    sequences, layout = len(check(context, "attention context", I32, -1)), cache.layout
    check(cu_q, "attention cu_q", I32, sequences + 1)
    max_blocks = check(block_tables, "attention block_tables", I32, sequences, -1).shape[1]
    blocks, at_cache = cache_at(cache)
    if out.numel():
        cpu.call(
            "attention", out.data_ptr(), q.data_ptr(), *at_cache, cu_q.data_ptr(), context.data_ptr(),
            block_tables.data_ptr(), len(q), sequences, heads, layout.kv_heads, layout.head_dim, layout.block_size,
            blocks, max_blocks, layout.format, cache.step, *rest,
        )  # fmt: skip
    return out


@impl("gated_activation", "cpu")
def gated_activation(cpu: Cpu, gate_up: Tensor, kind: str) -> Tensor:
    rows, width = check(gate_up, "gated_activation gate_up", F32, -1, -1).shape
    if width % 2:
        raise ValueError(f"gated_activation: {width} columns are not a gate and an up part of one size")
    out = cpu.arena.empty(rows, width // 2)
    if rows:
        cpu.call("gated_activation", out.data_ptr(), gate_up.data_ptr(), rows, width // 2, ACTIVATION_NUMBERS[kind])
    return out


@impl("activation", "cpu")
def activation(cpu: Cpu, x: Tensor, kind: str) -> Tensor:
    rows, width = check(x, "activation x", F32, -1, -1).shape
    out = cpu.arena.empty(rows, width)
    if rows:
        cpu.call("activation", out.data_ptr(), x.data_ptr(), rows, width, ACTIVATION_NUMBERS[kind])
    return out


@impl("gated_mlp", "cpu")
def gated_mlp(
    cpu: Cpu,
    x: Tensor,
    gate_up: Packed,
    gate_up_bias: Tensor | None,
    down: Packed,
    down_bias: Tensor | None,
    kind: str,
) -> Tensor:
    return _mlp(cpu, "gated_mlp", x, (gate_up, gate_up_bias), (down, down_bias), kind)


@impl("plain_mlp", "cpu")
def plain_mlp(
    cpu: Cpu,
    x: Tensor,
    up: Packed,
    up_bias: Tensor | None,
    down: Packed,
    down_bias: Tensor | None,
    kind: str,
) -> Tensor:
    return _mlp(cpu, "plain_mlp", x, (up, up_bias), (down, down_bias), kind)


Biased = tuple[Packed, Tensor | None]


def _mlp(cpu: Cpu, name: str, x: Tensor, first: Biased, second: Biased, kind: str) -> Tensor:
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
            name, out.data_ptr(), x.data_ptr(), up.handle.at, 0 if up_bias is None else up_bias.data_ptr(),
            down.handle.at, 0 if down_bias is None else down_bias.data_ptr(), rows, ACTIVATION_NUMBERS[kind],
        )  # fmt: skip
    return out


def fuses_mlp(gate_up: Packed, down: Packed) -> bool:
    """Whether the native `gated_mlp` and `plain_mlp` take these: no tables, columns in order, int8 activations."""
    return down.k % 16 == 0 and all(_fuses(w) for w in (gate_up, down))


def _fuses(w: Packed) -> bool:
    return KINDS[w.kind].fuses and w.handle.order == 0 and w.handle.digits == 1


@impl("take_rows", "cpu")
def take_rows(cpu: Cpu, x: Tensor, delta: Tensor, rows: Tensor | None) -> Tensor:
    return _rows_of(cpu, "take_rows", x, delta, rows)


@impl("pick_rows", "cpu")
def pick_rows(cpu: Cpu, x: Tensor, rows: Tensor) -> Tensor:
    return _rows_of(cpu, "pick_rows", x, None, rows)


def _rows_of(cpu: Cpu, name: str, x: Tensor, delta: Tensor | None, rows: Tensor | None) -> Tensor:
    total, d = check(x, f"{name} x", F32, -1, -1).shape
    at_delta = 0 if delta is None else check(delta, f"{name} delta", F32, total, d).data_ptr()
    at_rows = 0 if rows is None else check(rows, f"{name} rows", I32, -1).data_ptr()
    count = total if rows is None else len(rows)
    out = cpu.arena.empty(count, d)
    if count:
        cpu.call("take_rows", out.data_ptr(), x.data_ptr(), at_delta, at_rows, count, d, total)
    return out


@impl("copy_blocks", "cpu")
def copy_blocks(cpu: Cpu, caches: list[KVCache], pairs: tuple[tuple[int, int], ...]) -> None:
    if not pairs or not caches:
        return
    flat = check(torch.tensor(pairs, dtype=I64), "copy_blocks pairs", I64, -1, 2)
    where, blocks = _block_table(caches)
    cpu.hold(flat, where)
    cpu.call("copy_blocks", where.data_ptr(), len(where), flat.data_ptr(), len(pairs), blocks)


@impl("move_slots", "cpu")
def move_slots(cpu: Cpu, caches: list[KVCache], pairs: tuple[tuple[int, int], ...]) -> None:
    if not pairs or not caches:
        return
    flat = check(torch.tensor(pairs, dtype=I64), "move_slots pairs", I64, -1, 2)
    blocks, size = min(cache_at(cache)[0] for cache in caches), caches[0].layout.block_size
    if any(cache.layout.block_size != size for cache in caches):
        raise ValueError("move_slots: the caches' blocks are of several sizes")
    where = torch.tensor([row for cache in caches for row in _token_rows(cache)], dtype=I64)
    cpu.hold(flat, where)
    cpu.call("move_slots", where.data_ptr(), len(where), flat.data_ptr(), len(pairs), blocks, size)


def _token_rows(cache: KVCache) -> list[tuple[int, ...]]:
    """How tokens lie in keys and in values, as csrc/blocks.cpp reads it."""
    at, width = cache.layout, cache.layout.dtype.itemsize
    head = cache.keys.stride(1) * cache.keys.element_size()
    return [
        (t.data_ptr(), cache.step, at.kv_heads, head, at.head_dim * width, side, word, at.scaled)
        for t, side, word in ((cache.keys, at.lanes, at.pair * width), (cache.values, at.vpair, width))
    ]


@impl("zero_blocks", "cpu")
def zero_blocks(cpu: Cpu, caches: list[KVCache], blocks: tuple[int, ...]) -> None:
    if not blocks or not caches:
        return
    flat = check(torch.tensor(blocks, dtype=I64), "zero_blocks blocks", I64, -1)
    where, total = _block_table(caches)
    cpu.hold(flat, where)
    cpu.call("zero_blocks", where.data_ptr(), len(where), flat.data_ptr(), len(blocks), total)


def _block_table(caches: list[KVCache]) -> tuple[Tensor, int]:
    """(address, bytes of a block) of every key and value cache, and the smallest number of blocks."""
    blocks = min(cache_at(cache)[0] for cache in caches)
    tensors = [t for cache in caches for t in (cache.keys, cache.values)]
    rows = [(t.data_ptr(), t.stride(0) * t.element_size()) for t in tensors]
    return torch.tensor(rows, dtype=I64), blocks


def cache_at(cache: KVCache) -> tuple[int, tuple[int, int]]:
    """(number of blocks, (address of keys, address of values)) of a cache that has the shape its layout says."""
    layout, keys, values = cache.layout, cache.keys, cache.values
    at_keys, at_values = layout.shapes(keys.shape[0])
    check(keys[0], "block of a key cache", layout.element, *at_keys[1:])
    check(values[0], "block of a value cache", layout.element, *at_values[1:])
    if not cache.paired:
        raise ValueError("keys and values are not of the same blocks")
    return keys.shape[0], (keys.data_ptr(), values.data_ptr())


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


MAX_HEAD_DIM = 512
