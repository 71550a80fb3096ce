"""The definitions: every op in plain torch, float32 unless said otherwise. Slow on purpose, correct by reading.

T = rows (tokens) of the batch, S = sequences, R = rows that want logits, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.core.dtypes import F32
from quire.core.windows import first_seen
from quire.ops.arrays import to_numpy, to_torch
from quire.ops.attention_spec import AttentionSpec
from quire.ops.layout import KVCache, KVLayout
from quire.ops.op import op
from quire.ops.reference.caches import allocate, key_codes, logical, scales, value_codes, write
from quire.ops.weights import E4M3_MOST, MOST, Packed, PackedTable, PieceTable, StoredTable

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


@op(tolerance=0.0)
def embedding(
    tokens: Tensor, table: Tensor | PackedTable | StoredTable | PieceTable, first: int | None = None
) -> Tensor:
    """Rows of `table` [V, d] (f32, bf16, f16, a packed matrix of any kind, or rows of a file in ggml's block formats)
    at `tokens` [T] int32, as f32 [T, d].

    `first`: the table has the tokens from that on, and rows of others are -0: x + -0 is x for every x.
    """
    if first is not None:
        assert not isinstance(table, PieceTable), "it has all rows"
        count, width = _table_shape(table)
        here = (tokens >= first) & (tokens < first + count)
        found = torch.full((len(tokens), width), -0.0)
        found[here] = embedding(tokens[here] - first, table)
        return found
    if isinstance(table, PieceTable):
        return _rows_of_pieces(tokens, table)
    if isinstance(table, StoredTable):
        return to_torch(table.widen(to_numpy(table.data[tokens.long()])).dequantize())
    if not isinstance(table, PackedTable):
        return table[tokens.long()].float()
    assert table.matrix.plain is not None
    rows: Tensor = table.matrix.plain.take_rows(tokens.long()).dequantize()
    return rows.bfloat16().float() if table.rounded else rows


def _rows_of_pieces(tokens: Tensor, table: PieceTable) -> Tensor:
    """Rows of a table in pieces."""
    each, width = table.pieces[0].shape
    found = [to_torch(table.pieces[token // each][token % each]).float() for token in tokens.tolist()]
    return torch.stack(found) if found else torch.zeros(0, width)


def _table_shape(table: Tensor | PackedTable | StoredTable) -> tuple[int, int]:
    """Rows and columns of a table."""
    if isinstance(table, StoredTable):
        return len(table.data), table.k
    return (table.matrix.n, table.matrix.k) if isinstance(table, PackedTable) else (len(table), table.shape[1])


@op(tolerance=2e-6)
def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, rows of x [T, d] f32 (Zhang and Sennrich 2019)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@op(tolerance=2e-6, into="x")
def add_rmsnorm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, its rmsnorm), all [T, d] f32. x is given up: the sum, the residual stream, may lie in its place."""
    x = x + delta
    return x, rmsnorm(x, weight, eps)


def quantize_activations(x: Tensor, group: int, bits: int = 8) -> tuple[Tensor, Tensor]:
    """Rows x [t, k] f32 to integer codes (as f32) and f32 scales [t, k / group], symmetric, half to even.

    scale = max|x| / MOST[bits]. One scale per group, not per token: one outlier channel must not cost the others
    their precision. 16 bits are two digits of base 255, each -127..127, so that kernels multiply bytes.
    """
    most = MOST[bits]
    groups = x.reshape(x.shape[0], x.shape[1] // group, group)
    top = groups.abs().amax(-1)
    scale = top / most
    inverse = torch.where(top > 2e-34, most / top, torch.zeros_like(top))  # of anything smaller it is infinite
    codes = torch.round(groups * inverse[..., None]).clamp(-most, most)
    return codes.flatten(1), scale


def quantize_to_float8(x: Tensor, group: int, bits: int = 8) -> tuple[Tensor, Tensor]:
    """Work as `quantize_activations`, with codes in float8_e4m3fn (as f32): scale = max|x| / 448."""
    groups = x.reshape(x.shape[0], x.shape[1] // group, group)
    top = groups.abs().amax(-1)
    inverse = torch.where(top > 2e-34, E4M3_MOST / top, torch.zeros_like(top))
    codes = (groups * inverse[..., None]).to(torch.float8_e4m3fn)
    return codes.float().flatten(1), top / E4M3_MOST


@op(tolerance=2e-5)
def linear(x: Tensor, w: Packed, bias: Tensor | None) -> Tensor:
    """x [T, k] f32 times w [n, k] transposed, plus bias [n] f32: f32 [T, n].

    f32, f16 and bf16_f32 weights: f32 products. bf16 weights: x is rounded to bf16, products are accumulated in f32.
    Integer codes and tables: x is quantized to 8 or 16 bits per group of the weight's group size (after its columns
    were put into the weight's order), the integer dot product of a group is exact, and the groups are summed in f32 in
    ascending order; with `activation_bits` 0 x stays as it is. Float8 codes: as 8-bit integers, with x in float8, or
    with x in bf16.
    """
    assert w.plain is not None
    out: Tensor
    if w.kind == "f32":
        out = x @ w.plain.codes.t()
    elif w.kind in ("bf16_f32", "f16"):
        out = x.float() @ w.plain.codes.float().t()
    elif w.kind == "bf16":
        out = x.bfloat16().float() @ w.plain.codes.float().t()
    elif not w.plain.activation_bits:
        out = x @ w.plain.dequantize().t()
    elif w.kind == "fp8" and w.plain.activation_bits == 16:
        out = x.bfloat16().float() @ w.plain.dequantize().t()
    else:
        order = w.plain.order
        quantize = quantize_to_float8 if w.kind == "fp8" else quantize_activations
        codes, scale = quantize(x if order is None else x[:, order], w.group, w.plain.activation_bits)
        rounded = (codes.view(*scale.shape, w.group) * scale[..., None]).flatten(1)
        out = (rounded if order is None else rounded[:, order.argsort()]) @ w.plain.dequantize().t()
    return out if bias is None else out + bias


def rotated(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """x [T, heads, d] with the first r numbers of each head turned; `table` as of `rope_and_cache`."""
    half = table.shape[2]
    cos, sin = table[positions.long()].unsqueeze(1).unbind(2)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


@op(tolerance=2e-5, into="qkv")
def rope_and_cache(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    slots: Tensor,
    cache: KVCache,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """Rotate queries and keys and store keys and values; returns qkv, whose query part is what `attention` reads.

    qkv [T, (heads + 2 kv_heads) * head_dim] f32, changed in place. `table` [max_positions, 2, r / 2] f32 holds cosines
    and sines of the first r dimensions of a head (half-split pairs (i, i + r/2); Su et al. 2021); the rest passes.
    `norms`: per-head rmsnorm weights [head_dim] of queries and keys, applied before the rotation (Qwen3).
    `slots` [T] int64: where each token's key and value go; `positions` [T] int32.
    """
    d, hk = cache.layout.head_dim, cache.layout.kv_heads
    heads = qkv.view(len(qkv), qkv.shape[1] // d, d)
    q, k, v = heads[:, : -2 * hk], heads[:, -2 * hk : -hk], heads[:, -hk:]
    if norms is not None:
        q, k = rmsnorm(q, norms[0], eps), rmsnorm(k, norms[1], eps)
    q, k = rotated(q, positions, table), rotated(k, positions, table)
    write(cache, slots, k, v)
    return torch.cat((q, k, v), 1).flatten(1)


@op(tolerance=2e-2)
def attention(
    qkv: Tensor,
    cache: KVCache,
    cu_q: Tensor,
    context: Tensor,
    block_tables: Tensor,
    spec: AttentionSpec,
    tree: Tensor | None = None,
) -> Tensor:
    """softmax(scores) v over paged keys and values; `spec` says what a score is, and which keys a row sees.

    A batch mixes prefill chunks and decodes. The queries are the leading heads of qkv [T, (heads + 2 kv_heads) *
    head_dim]. Rows cu_q[s]..cu_q[s + 1] belong to sequence s, whose cache holds context[s] tokens including these rows;
    its blocks are block_tables[s] (int32 [S, max_blocks]). Query heads share keys in groups of heads / kv_heads (GQA,
    Ainslie et al. 2023). Blocks wholly before the window are never read. The last entry of cu_q is T; S = len(context)
    and sequences with no rows are allowed. Returns f32 [T, heads * head_dim].

    `tree` (int64 [T] of bit masks, as unsigned) lets the last rows of a sequence, at most 64, be a draft that branches
    (token trees, Miao et al. 2023): 0 for other rows; bit j of a drafted row: it sees the draft's token j. A row sees
    itself (its highest bit) and what its parent sees; its position is that of the draft's first row plus its number of
    ancestors, and so are those of its ancestors, as if they were the only draft.
    """
    d, hk, block_size = cache.layout.head_dim, cache.layout.kv_heads, cache.layout.block_size
    q = qkv.view(len(qkv), qkv.shape[1] // d, d)[:, : -2 * hk]
    out = torch.zeros((q.shape[0], q.shape[1], d))
    window, softcap = spec.window, spec.softcap
    repeat = q.shape[1] // hk
    for s in range(len(context)):
        begin, end, length = int(cu_q[s]), int(cu_q[s + 1]), int(context[s])
        if begin == end:
            continue
        first = first_seen(window, length - (end - begin)) // block_size
        table = block_tables[s, first : -(-length // block_size)].long()
        at = first * block_size
        k, v = (
            t.transpose(0, 1).flatten(1, 2)[:, : length - at].float().repeat_interleave(repeat, 0)
            for t in logical(cache, table)
        )
        if tree is not None and bool(tree[begin:end].any()):
            out[begin:end] = _attend_tree(qkv[begin:end], cache, length, block_tables[s], spec, tree[begin:end])
            continue
        scores = q[begin:end].transpose(0, 1) @ k.transpose(1, 2) * spec.scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        row = torch.arange(length - (end - begin), length)[:, None]
        key = torch.arange(at, length)[None]
        lowest = torch.tensor([first_seen(window, i) for i in range(length - (end - begin), length)])[:, None]
        hidden = (key > row + spec.after) | (key < lowest)
        if spec.alibi is not None:
            scores = scores - spec.alibi[:, None, None] * (key - row).abs()
        if spec.bias is not None:
            scores = scores + spec.bias[:, (row - key + spec.behind).clamp(0, spec.bias.shape[1] - 1)]
        scores = scores.masked_fill(hidden, -torch.inf)
        if spec.sinks is not None:
            scores = torch.cat((scores, spec.sinks[:, None, None].expand(-1, end - begin, 1)), -1)
        probs = scores.softmax(-1)[..., : length - at]
        out[begin:end] = (probs @ v).transpose(0, 1)
    return out.flatten(1)


def _attend_tree(qkv: Tensor, cache: KVCache, length: int, table: Tensor, spec: AttentionSpec, tree: Tensor) -> Tensor:
    """The rows of one sequence with a tree: each is the last token of a sequence of its own, in a cache of its own."""
    at, masks = cache.layout, [mask & (1 << 64) - 1 for mask in tree.tolist()]
    start = length - len(masks)
    root = start + sum(mask == 0 for mask in masks)
    first = first_seen(spec.window, start) // at.block_size
    k, v = (t.transpose(1, 2).flatten(0, 1) for t in logical(cache, table[first : -(-length // at.block_size)].long()))
    plain = KVLayout(at.block_size, at.kv_heads, at.head_dim, F32)
    rows = []
    for i, mask in enumerate(masks):
        seen = (
            list(range(root)) + [root + j for j in range(64) if mask >> j & 1] if mask else list(range(start + i + 1))
        )
        kept = torch.tensor([p - first * at.block_size for p in seen if p >= first * at.block_size])
        own = allocate(plain, -(-len(seen) // at.block_size))
        write(own, torch.arange(len(seen) - len(kept), len(seen)), k[kept], v[kept])
        one, blocks = torch.tensor([0, 1]), torch.arange(len(own.keys))[None]
        rows.append(attention(qkv[i : i + 1], own, one, torch.tensor([len(seen)]), blocks, spec))
    return torch.cat(rows).view(len(masks), -1, at.head_dim)


@op(tolerance=2e-6)
def gated_activation(gate_up: Tensor, kind: str) -> Tensor:
    """act(gate) * up for gate_up [T, 2 f] = [gate; up]: f32 [T, f]. `kind` is a key of ACTIVATIONS."""
    gate, up = gate_up.chunk(2, -1)
    return FUNCTIONS[kind](gate) * up


@op(tolerance=2e-6)
def activation(x: Tensor, kind: str) -> Tensor:
    """act(x) for x [T, f]: f32 [T, f], the MLP without a gate. `kind` is a key of ACTIVATIONS."""
    return FUNCTIONS[kind](x)


@op(tolerance=2e-2)
def gated_mlp(
    x: Tensor, gate_up: Packed, gate_up_bias: Tensor | None, down: Packed, down_bias: Tensor | None, kind: str
) -> Tensor:
    """down(act(gate(x)) * up(x)), x [T, hidden] f32 -> [T, hidden] f32 (Shazeer 2020): `linear`, `gated_activation`,
    `linear`. gate_up [2 f, hidden], down [hidden, f]; `kind` is a key of ACTIVATIONS.

    The tolerance is that of one code: a difference in the last bit of a product may round it to the next int8 code.
    """
    return linear(gated_activation(linear(x, gate_up, gate_up_bias), kind), down, down_bias)


@op(tolerance=2e-2)
def plain_mlp(
    x: Tensor, up: Packed, up_bias: Tensor | None, down: Packed, down_bias: Tensor | None, kind: str
) -> Tensor:
    """down(act(up(x))), x [T, hidden] f32 -> [T, hidden] f32: `linear`, `activation`, `linear`.

    up [f, hidden], down [hidden, f]; `kind` is a key of ACTIVATIONS. The tolerance is that of `gated_mlp`.
    """
    return linear(activation(linear(x, up, up_bias), kind), down, down_bias)


@op(tolerance=0.0)
def take_rows(x: Tensor, delta: Tensor, rows: Tensor | None) -> Tensor:
    """(x + delta)[rows]: the rows [R] (int32) of the residual stream that want logits; None: all."""
    return x + delta if rows is None else x[rows.long()] + delta[rows.long()]


@op(tolerance=0.0)
def pick_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], rows [R] int32."""
    return x[rows.long()]


@op(tolerance=0.0)
def copy_blocks(caches: list[KVCache], pairs: tuple[tuple[int, int], ...]) -> None:
    """Copy block source -> destination in every layer's key and value cache (copy-on-write)."""
    for cache in caches:
        for tensor in cache.arrays:
            for source, destination in pairs:
                tensor[destination] = tensor[source]


@op(tolerance=0.0)
def move_slots(caches: list[KVCache], pairs: tuple[tuple[int, int], ...]) -> None:
    """Copy the token in slot source -> destination in every layer's key and value cache, one pair after the other.

    A slot is block * block_size + offset, as in `rope_and_cache`. Caches of latents are not known here.
    """
    for cache in caches:
        at = cache.layout
        parts = [(key_codes(at, cache.keys), at.lanes), (value_codes(at, cache.values), at.vpair)]
        for source, destination in pairs:
            (b, i), (c, j) = divmod(source, at.block_size), divmod(destination, at.block_size)
            for codes, side in parts:
                codes[c, :, j // side, :, j % side] = codes[b, :, i // side, :, i % side]
            for tensor in (cache.keys, cache.values) if at.scaled else ():
                scales(at, tensor)[c, :, j] = scales(at, tensor)[b, :, i]


@op(tolerance=0.0)
def zero_blocks(caches: list[KVCache], blocks: tuple[int, ...]) -> None:
    """Zero `blocks` in every layer's key and value cache: a block that held inf or NaN is scrubbed before its reuse."""
    for cache in caches:
        for tensor in cache.arrays:
            tensor[list(blocks)] = 0
