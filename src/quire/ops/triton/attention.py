"""The GPU backend's side of `attention` and `latent_attention`: which kernels run, over how many programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.core.dtypes import BF16, F16, F32, I8
from quire.core.windows import most_seen
from quire.ops.attention_spec import AttentionSpec
from quire.ops.latents import LatentReads, rank_of
from quire.ops.layout import KVCache
from quire.ops.op import impl
from quire.ops.triton import attention_kernels as kernels
from quire.ops.triton.checks import activations, check_cache, scales_of, tensor
from quire.ops.triton.chosen import attend_chosen
from quire.ops.triton.chunk_kernels import chunk_kernel
from quire.ops.triton.gpu import Gpu

DOTS = {F32: tl.float32, BF16: tl.bfloat16, F16: tl.float16}
"""Cache dtype -> what is multiplied; codes are exact in bf16."""
SPLIT = 512
"""Keys of a split at least: short enough that few sequences fill a device, long enough that parts are few bytes."""
MOST_SPLITS = 32
"""Splits of the longest sequence; the parts of a decode step take rows * heads * splits * head_dim * 4 bytes."""
MOST_PARTS = 64 << 20
"""Bytes of parts for which steps of several rows per sequence still split their keys."""
CHUNK_ROWS = 16
"""Rows per sequence, on average, from which they do not: tiles of rows are programs enough."""


@dataclass(frozen=True)
class PagedBatch:
    """A batch as `attention` gets it, checked."""

    cu_q: Tensor
    context: Tensor
    tables: Tensor
    spec: AttentionSpec
    tree: Tensor | None


@dataclass(frozen=True)
class Queries:
    """Rows [T, at least heads * d] and, for latents, rows whose heads of `width` end in `r` rotated numbers."""

    rows: Tensor
    heads: int
    d: int
    rotated: Tensor | None = None
    width: int = 0
    r: int = 0


@impl("attention", "triton")
def attention(
    gpu: Gpu,
    qkv: Tensor,
    cache: KVCache,
    cu_q: Tensor,
    context: Tensor,
    block_tables: Tensor,
    spec: AttentionSpec,
    tree: Tensor | None = None,
) -> Tensor:
    rows, width = activations(qkv, "attention qkv")
    heads = query_heads(width, cache.layout.kv_heads, cache.layout.head_dim)
    batch = _paged("attention", cu_q, context, block_tables, spec, tree)
    check_cache(cache)
    for name, numbers in (("sinks", spec.sinks), ("alibi", spec.alibi)):
        if numbers is not None:
            tensor(numbers, f"attention {name}", torch.float32, heads)
    if spec.bias is not None and not tensor(spec.bias, "attention bias", torch.float32, heads, -1).shape[1]:
        raise ValueError("attention bias: needs at least one distance")
    if tree is not None:
        tensor(tree, "attention tree", torch.int64, rows)
    sizes = gpu.config("attention", head_dim=cache.layout.head_dim, bytes=_dot(cache).primitive_bitwidth // 8)
    return _attend(gpu, Queries(qkv, heads, cache.layout.head_dim), cache, batch, sizes)


@impl("latent_attention", "triton")
def latent_attention(
    gpu: Gpu,
    latent: Tensor,
    q: Tensor,
    cache: KVCache,
    cu_q: Tensor,
    context: Tensor,
    block_tables: Tensor,
    reads: LatentReads,
) -> Tensor:
    rank = rank_of(cache)
    rows, width = activations(latent, "latent_attention latent")
    q_width = activations(q, "latent_attention q", rows)[1]
    heads = width // rank
    if width % rank or q_width % max(heads, 1):
        raise ValueError(f"latent_attention: {width} and {q_width} columns are not heads of one number")
    check_cache(cache)
    if reads.sinks is not None:
        tensor(reads.sinks, "latent_attention sinks", torch.float32, heads)
    spec = AttentionSpec(reads.scale, reads.window, sinks=reads.sinks)
    batch = _paged("latent_attention", cu_q, context, block_tables, spec, None)
    sizes = gpu.config("latent_attention", rank=rank, bytes=_dot(cache).primitive_bitwidth // 8)
    queries = Queries(latent, heads, rank, q, q_width // heads, cache.layout.head_dim)
    if reads.chosen is not None:
        if reads.window:
            raise ValueError("latent_attention: chosen tokens have no window")
        split = splits_of(block_tables.shape[1] * cache.layout.block_size)[0]
        static = _static(gpu, queries, cache, batch, sizes["keys"]) | {"SPLIT": split}
        return attend_chosen(gpu, (latent, q), cache, (cu_q, context, block_tables), reads, static, sizes)
    return _attend(gpu, queries, cache, batch, sizes)


def query_heads(width: int, kv_heads: int, d: int) -> int:
    """Query heads of a qkv row of `width` numbers."""
    heads, rest = divmod(width, d)
    heads -= 2 * kv_heads
    if rest or heads < 1 or heads % kv_heads or d % 8 or d > 512:
        raise ValueError(
            f"qkv of {width} columns is not (heads + 2 * {kv_heads}) * {d} with heads a multiple of kv_heads and "
            "head_dim a multiple of 8 up to 512"
        )
    return heads


def _paged(
    what: str, cu_q: Tensor, context: Tensor, tables: Tensor, spec: AttentionSpec, tree: Tensor | None
) -> PagedBatch:
    sequences = len(tensor(context, f"{what} context", torch.int32, -1))
    tensor(cu_q, f"{what} cu_q", torch.int32, sequences + 1)
    return PagedBatch(cu_q, context, tensor(tables, f"{what} block_tables", torch.int32, sequences, -1), spec, tree)


def _attend(gpu: Gpu, queries: Queries, cache: KVCache, batch: PagedBatch, sizes: dict[str, int]) -> Tensor:
    """Few rows per sequence: all by splits of their keys. Otherwise sequences of one row by splits, the others whole.

    Which of the two is chosen by sizes that the host knows, and changes no bit.
    """
    rows, sequences, heads, d = len(queries.rows), len(batch.context), queries.heads, queries.d
    out = gpu.empty(rows, heads * d, dtype=queries.rows.dtype)
    if not rows:
        return out
    split, splits = splits_of(batch.tables.shape[1] * cache.layout.block_size)
    single = rows > CHUNK_ROWS * sequences or (rows > sequences and rows * heads * splits * d * 4 > MOST_PARTS)
    group = heads // cache.layout.kv_heads
    static = _static(gpu, queries, cache, batch, sizes["keys"]) | {"SPLIT": split}
    before, after = _arguments(queries, cache, batch)
    spots = sequences if single else rows
    acc, ml = gpu.empty(spots, heads, splits, d), gpu.empty(spots, heads, splits, 2)
    tile, tiles = _tiles(group, sizes["rows"])
    tiles *= cache.layout.kv_heads
    parts = min(splits, max(sizes["parts"], sizes["programs"] * gpu.chip.processors // (sequences * tiles)))
    kernels.split_kernel[(sequences, tiles, parts)](
        acc, ml, *before, batch.spec.alibi, batch.spec.bias, batch.tree, *after, heads, splits, parts, SINGLE=single,
        **tile, **static, num_warps=sizes["warps"], num_stages=sizes["stages"],
    )  # fmt: skip
    together = sizes["merged_heads"]
    kernels.merge_kernel[(sequences, triton.cdiv(heads, together))](
        out, acc, ml, batch.cu_q, batch.context, batch.spec.sinks, batch.tree, most_seen(batch.spec.window), heads,
        splits, D=d, BD=static["BD"], BH=together, SPLIT=split, SPEC=static["SPEC"], SINGLE=single,
        num_warps=sizes["merge_warps"],
    )  # fmt: skip
    if single:
        tile, tiles = _tiles(group, sizes["chunk_rows"])
        # Triton 3.6 cannot translate what its pipeline for AMD makes of a load that is added to a product
        stages = 1 if batch.spec.bias is not None and not gpu.chip.ptx else sizes["chunk_stages"]
        chunk_kernel[(rows // (tile["BM"] // tile["TILE_HEADS"]) + sequences, tiles * cache.layout.kv_heads)](
            out, *before, batch.spec.alibi, batch.spec.bias, batch.spec.sinks, batch.tree, *after, heads, sequences,
            **tile, **static, num_warps=sizes["chunk_warps"], num_stages=stages,
        )  # fmt: skip
    return out


def splits_of(span: int) -> tuple[int, int]:
    """Keys of a split and number of splits for tables that hold up to `span` tokens: not for this batch's lengths."""
    split = max(SPLIT, triton.next_power_of_2(triton.cdiv(span, MOST_SPLITS)))
    return split, max(1, triton.cdiv(span, split))


def _dot(cache: KVCache) -> Any:
    return DOTS.get(cache.layout.dtype, tl.bfloat16)


def _arguments(queries: Queries, cache: KVCache, batch: PagedBatch) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments qkv..tables and factor..head_step of the kernels."""
    spec, rotated = batch.spec, queries.rotated
    factor = spec.scale
    if spec.softcap:
        factor /= spec.softcap
    elif spec.alibi is None and spec.bias is None:
        factor *= kernels.LOG2E.value
    before = (queries.rows, rotated, cache.keys, cache.values, *scales_of(cache), batch.cu_q, batch.context,
              batch.tables)  # fmt: skip
    after = (factor, spec.softcap, most_seen(spec.window), queries.rows.stride(0),
             0 if rotated is None else rotated.stride(0), queries.width, batch.tables.stride(0),
             cache.values.stride(0), cache.keys.stride(0), cache.values.stride(1))  # fmt: skip
    return before, after


def _tiles(group: int, rows: int) -> tuple[dict[str, int], int]:
    """Constants of tiles of so many rows over `group` heads of one key head, and tiles that cover a token's."""
    tiles = triton.cdiv(group, rows)
    return {"BM": rows, "TILE_HEADS": triton.cdiv(group, tiles)}, tiles


def _static(gpu: Gpu, queries: Queries, cache: KVCache, batch: PagedBatch, keys: int) -> dict[str, Any]:
    """The constants of both kernels, without the split."""
    layout, spec = cache.layout, batch.spec
    group = queries.heads // layout.kv_heads
    kind = kernels.PLAIN
    if layout.scaled:
        fp8 = kernels.FP8_NATIVE if gpu.converts_float8 else kernels.FP8_BITS
        kind = kernels.INT8 if layout.dtype == I8 else fp8
    return {
        "D": queries.d,
        "BD": max(16, triton.next_power_of_2(queries.d)),
        "R": queries.r,
        "SIZE": layout.block_size,
        "GROUP": group,
        "BN": keys,
        "SPEC": (
            0 if not spec.window else kernels.WINDOW.value if spec.window > 0 else kernels.CHUNKED.value,
            bool(spec.softcap),
            spec.alibi is not None,
            batch.tree is not None,
            0 if spec.bias is None else spec.bias.shape[1],
            spec.after,
            spec.behind,
        ),
        "DOT": _dot(cache),
        "KIND": kind.value,
    }
