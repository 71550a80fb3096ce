"""Launches of every kind that models make: each kernel, cache, score function, form of weight and row of `configs`.

Sizes are those of Llama-3.1-8B and, where they matter, of its relatives: they choose tiles, and what 16 divides. Kinds
come from the tables that define them, so a new one is a new launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.ops.attention_spec import AttentionSpec
from quire.ops.convolution import Convolution, RowLayout
from quire.ops.experts import ACTIVATIONS, SCORES, Grouped, Routing
from quire.ops.indexer import BlockIndexer, Choice, IndexLayout
from quire.ops.latents import LatentHeads, LatentLayout, LatentReads
from quire.ops.layout import KV_FORMATS, LARGEST, KVCache, PlainLayout
from quire.ops.lazy import array_dtype, torch_dtype
from quire.ops.recurrent import DeltaSpec, ScanSpec, StateBatch
from quire.ops.reference.caches import allocate
from quire.ops.sampling import DRAW, QUERY, RowEdits
from quire.ops.triton import attention, convolution, indexer, linear, moe, recurrent, rowwise, sampling, streams
from quire.ops.triton import cache as caches
from quire.ops.triton.gpu import INTERPRETER, Gpu
from quire.ops.triton.pack import E2M1_TABLE, pack
from quire.ops.triton.runtime import Immediate
from quire.ops.weights import Packed, Weight

Launch = tuple[str, Callable[[], object]]
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAMES = {F32: "f32", F16: "f16", BF16: "bf16", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
CACHED = tuple(map(torch_dtype, KV_FORMATS))
"""Numbers of caches."""


def all_launches(gpu: Gpu) -> Iterator[Launch]:
    """(name, what launches it) of everything."""
    for part in (
        products, experts, attentions, latents, indexers, cached, convolutions, row_by_row, several_streams,
        recurrences, adapters, samplers,
    ):  # fmt: skip
        yield from part(gpu)


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """A tensor of a launch; nobody reads it."""
    return torch.zeros(shape, dtype=dtype)


def ints(*shape: int) -> Tensor:
    """int32."""
    return zeros(*shape, dtype=torch.int32)


GROUPED = {
    "int4 zeros": ("int4", 128), "int4 mins": ("int4", 32), "int8 zeros": ("int8", 128), "fp8 g128": ("fp8", 128),
    "table4 g32": ("table4", 32), "table4 g64": ("table4", 64), "e2m1 g32": ("table4", 32),
    **{f"int4 g{group}": ("int4", group) for group in (16, 32, 64, 128)},
    **{f"int8 g{group}": ("int8", group) for group in (16, 32, 64, 128)},
    **{f"int8 g{group}, both": ("int8", group) for group in (32, 64, 128)},
    "int8 rows, both": ("int8", 0), "fp8 rows": ("fp8", 0),
}  # fmt: skip
"""Form of a matrix of codes -> kind, columns of a group (0: all of a row)."""
PLAIN = {"f32": F32, "f16": F16, "bf16": BF16}
FEWER = {"f16, 2:4": "f16", "bf16, 2:4": "bf16"}
"""Form without zeros -> that of the dense matrix."""


def weight(form: str, n: int, k: int) -> Weight:
    """A matrix [n, k] in one of `PLAIN` or `GROUPED`."""
    if form in PLAIN:
        return Weight(form, zeros(n, k, dtype=PLAIN[form]))
    kind, group = GROUPED[form]
    shape = n, k // (group or k)
    codes = zeros(n, k, dtype=torch.float8_e4m3fn if kind == "fp8" else torch.int8)
    scales = zeros(*shape, dtype=F32 if kind in ("fp8", "table4") else F16)
    table = torch.tensor(E2M1_TABLE if "e2m1" in form else range(16), dtype=torch.int16) if kind == "table4" else None
    return Weight(
        kind, codes, scales, zeros(*shape, dtype=torch.int8) if "zeros" in form else None, group or k,
        mins=zeros(*shape, dtype=F16) if "mins" in form else None, table=table,
        activation_bits=8 if "both" in form or kind == "fp8" else 16,
    )  # fmt: skip


@cache
def packed(n: int, k: int, form: str) -> Packed:
    """A matrix as the kernels read it, which is the same for all devices."""
    gpu = Gpu(torch.device("cpu"), INTERPRETER, True, Immediate())
    gpu.sparse = form in FEWER
    return pack(gpu, weight(FEWER.get(form, form), n, k))


def forms(gpu: Gpu) -> list[str]:
    """Those that the device multiplies."""
    return [form for form in (*PLAIN, *GROUPED) if gpu.chip.float8 or not form.startswith("fp8")]


USUAL = ("f32", "f16", "bf16", "int4 g128", "int8 g128", "int8 g128, both", "int8 rows, both", "fp8 g128", "fp8 rows")
"""Forms that are launched with every tile; others have the tiles of one of these."""
BATCHES = (1, 64, 4096)
"""Rows of a batch, one for each row of `configs`."""


def products(gpu: Gpu) -> Iterator[Launch]:
    """Of four runs of columns, all in one program or each in its own, and of a single run."""
    for form in forms(gpu):
        for what, dtype in kinds_of_rows(form):
            for m in BATCHES if form in USUAL else (1, 4096):
                x = zeros(m, 4096, dtype=dtype)
                yield f"{what}, {m} rows", partial(linear.linear, gpu, x, packed(1024, 4096, form), None)
            if form in USUAL:
                x, bias = zeros(1, 1024, dtype=dtype), zeros(1024, dtype=F32)
                yield f"{what}, bias", partial(linear.linear, gpu, x, packed(1024, 1024, form), bias)
    for form, dense in FEWER.items():
        for m in BATCHES:
            x = zeros(m, 4096, dtype=PLAIN[dense])
            yield f"{form}, {m} rows", partial(linear.linear, gpu, x, packed(1024, 4096, form), None)
        yield (
            f"{form}, f32 rows",
            partial(linear.linear, gpu, zeros(1, 1028, dtype=F32), packed(1024, 1028, form), None),
        )
    heads = packed(16 * 128, 256, "bf16, 2:4")
    yield "per head, 2:4", partial(linear.head_linear, gpu, zeros(1, 16 * 256), heads, 16, 128)
    each = Grouped(packed(8 * 256, 1024, "bf16, 2:4"), 8, 256, None)
    yield "experts, 2:4", partial(linear.grouped_linear, gpu, zeros(8, 1024), each, None, ints(1, 9))
    heads = packed(16 * 128, 128, "bf16")
    for m in BATCHES:
        yield f"per head, {m} rows", partial(linear.head_linear, gpu, zeros(m, 16 * 192), heads, 16, 128)


def kinds_of_rows(form: str) -> list[tuple[str, torch.dtype]]:
    """(name, type) of the rows that meet a form: bf16, or fp16, and f32 in heads, which give logits."""
    if form == "f32":
        return [(form, F32)]
    own = [(form, F16 if form == "f16" else BF16)] + ([(f"{form}, f16 rows", F16)] if form == "int4 g128" else [])
    return own + ([(f"{form}, f32 rows", F32)] if form in USUAL else [])


def experts(gpu: Gpu) -> Iterator[Launch]:
    """Eight experts with biases, at each number of rows of one that has its tile; and all that surrounds them."""
    for form in forms(gpu):
        if form not in (*USUAL, "e2m1 g32"):
            continue
        for m in BATCHES if form in ("bf16", "int4 g128", "e2m1 g32") else (1,):
            offsets, tokens = ints(1, 9), ints(4 * m, 2)
            grouped = Grouped(packed(8 * 256, 1024, form), 8, 256, zeros(8, 256, dtype=F32))
            x = zeros(4 * m, 1024, dtype=F16 if form == "f16" else BF16)
            yield f"experts {form}, {m} rows", partial(linear.grouped_linear, gpu, x, grouped, tokens, offsets)
    routings = {s: Routing(128, 8, s, renormalize=True) for s in SCORES} | {
        "softmax, few": Routing(8, 2), "sigmoid, groups": Routing(256, 8, "sigmoid", True, 2.5, 8, 4, 2),
        "sparsemixer": Routing(16, 2, "sparsemixer", jitter=0.01),
    }  # fmt: skip
    for name, routing in routings.items():
        bias = zeros(routing.experts, dtype=F32) if "groups" in name else None
        yield name, partial(moe.route, gpu, zeros(4, routing.experts, dtype=F32), bias, routing)
    ids = ints(32, 8)
    yield "8 of 128", partial(moe.sort_by_expert, gpu, ids, 128)
    for dtype in (BF16, F32):
        wide, name = zeros(256, 4096, dtype=dtype), NAMES[dtype]
        yield name, partial(moe.combine, gpu, wide, ids, zeros(32, 8, dtype=F32))
        yield name, partial(moe.clamped_swiglu, gpu, wide, 1.702, 7.0)
        yield name, partial(moe.scale_by_sigmoid, gpu, wide, zeros(256, 1, dtype=dtype))
        yield name, partial(moe.scale_by_softplus, gpu, wide, zeros(256, 32, dtype=dtype))


def attentions(gpu: Gpu) -> Iterator[Launch]:
    """Every head size and cache, and every score function that a model has, over decodes and a chunk of a prompt."""
    sinks = {group: zeros(8 * group, dtype=F32) for group in (1, 4, 8)}
    for d in (32, 64, 80, 128, 256, 512):
        yield from attended(gpu, f"head {d}", d)
    for dtype in CACHED:
        for d in (64, 128, 256) if dtype in (*map(torch_dtype, LARGEST), F32) else (128,):
            if dtype is not BF16:
                yield from attended(gpu, f"head {d}, {NAMES[dtype]}", d, dtype)
    yield from attended(gpu, "head 128, one query head", 128, group=1)
    yield from attended(gpu, "head 64, 8 query heads", 64, group=8)
    yield from attended(gpu, "head 128, 131,072 tokens", 128, blocks=8192)
    yield from attended(gpu, "head 128, window", 128, spec=AttentionSpec(0.1, window=4096))
    yield from attended(gpu, "head 128, chunks", 128, spec=AttentionSpec(0.1, window=-8192))
    yield from attended(gpu, "head 256, window and cap", 256, spec=AttentionSpec(0.1, window=4096, softcap=50.0))
    yield from attended(gpu, "head 128, cap", 128, spec=AttentionSpec(0.1, softcap=50.0))
    yield from attended(gpu, "head 64, sinks", 64, group=8, spec=AttentionSpec(0.1, sinks=sinks[8]))
    yield from attended(gpu, "head 64, window and sinks", 64, group=8, spec=AttentionSpec(0.1, 128, sinks=sinks[8]))
    yield from attended(gpu, "head 128, slopes", 128, group=1, spec=AttentionSpec(0.1, alibi=sinks[1]))
    bias = zeros(8, 129, dtype=F32)
    yield from attended(gpu, "head 64, bias by distance", 64, group=1, spec=AttentionSpec(1.0, bias=bias))
    yield from attended(gpu, "head 128, tree", 128, tree=True)


def attended(
    gpu: Gpu, name: str, d: int, dtype: torch.dtype = BF16, group: int = 4, blocks: int = 512,
    spec: AttentionSpec | None = None, tree: bool = False,
) -> Iterator[Launch]:  # fmt: skip
    """Four decodes, and a chunk of 64 rows beside a decode."""
    layout = PlainLayout(16, 8, d, array_dtype(dtype))
    width = (8 * group + 16) * d
    for what, sequences, rows in (("decodes", 4, 4), ("a chunk", 2, 65)):
        qkv = zeros(rows, width, dtype=dtype if dtype in (F32, F16) else BF16)
        masks = zeros(rows, dtype=torch.int64) if tree else None
        yield f"{name}, {what}", partial(
            attention.attention, gpu, qkv, allocate(layout, 1), ints(sequences + 1), ints(sequences),
            ints(sequences, blocks), spec or AttentionSpec(0.1), masks,
        )  # fmt: skip


def latents(gpu: Gpu) -> Iterator[Launch]:
    """DeepSeek's rank and a small one, in both types, and such with a window."""
    for rank, heads, dtype in ((512, 16, BF16), (512, 128, BF16), (128, 16, BF16), (512, 16, F32), (128, 16, F32)):
        store = latent_cache(rank, dtype)
        for what, sequences, rows in (("decodes", 4, 4), ("a chunk", 2, 65)):
            yield f"latents of {rank}, {heads} heads, {NAMES[dtype]}, {what}", partial(
                attention.latent_attention, gpu, zeros(rows, heads * rank, dtype=dtype),
                zeros(rows, heads * 192, dtype=dtype), store, ints(sequences + 1), ints(sequences),
                ints(sequences, 512), LatentReads(0.1),
            )  # fmt: skip
    for what, sequences, rows in (("decodes", 4, 4), ("a chunk", 2, 65)):
        yield f"latents of 512 with a window, bf16, {what}", partial(
            attention.latent_attention, gpu, zeros(rows, 64 * 512, dtype=BF16), zeros(rows, 64 * 192, dtype=BF16),
            latent_cache(512, BF16), ints(sequences + 1), ints(sequences), ints(sequences, 512),
            LatentReads(0.1, window=512),
        )  # fmt: skip


def indexers(gpu: Gpu) -> Iterator[Launch]:
    """DeepSeek V3.2's, GLM-5's and MiniMax M3's, and attention to the latents that the first two choose."""
    positions, slots, table = ints(4), zeros(4, dtype=torch.int64), zeros(64, 2, 32, dtype=F32)
    batch = ints(5), ints(4), ints(4, 512)
    for dtype in (BF16, F16, F32):
        keys, name = allocate(IndexLayout.of(16, 128, array_dtype(dtype)), 1), NAMES[dtype]
        for heads in (64, 32):
            q, weights = zeros(4, heads * 128, dtype=dtype), zeros(4, heads, dtype=F32)
            label = f"indexer of {heads} heads, {name}"
            yield label, partial(indexer.choose_tokens, gpu, q, weights, keys, *batch, Choice(2048))
            at = positions, table, slots, keys, heads
            yield label, partial(indexer.index_rope_and_cache, gpu, q, zeros(4, 128, dtype=dtype), *at)
        q, blocks = zeros(4, 8 * 128, dtype=dtype), BlockIndexer(128, 128, 16, 1)
        yield f"blocks, {name}", partial(indexer.choose_blocks, gpu, q, keys, *batch, blocks)
    for rank, heads, dtype in ((512, 128, BF16), (512, 64, BF16), (128, 16, BF16), (512, 16, F32)):
        reads = LatentReads(0.1, ints(4, 2048))
        yield f"chosen latents of {rank}, {heads} heads, {NAMES[dtype]}", partial(
            attention.latent_attention, gpu, zeros(4, heads * rank, dtype=dtype), zeros(4, heads * 192, dtype=dtype),
            latent_cache(rank, dtype), *batch, reads,
        )  # fmt: skip


def latent_cache(rank: int, dtype: torch.dtype) -> KVCache:
    """A cache of one block."""
    return allocate(LatentLayout(16, 1, 64, array_dtype(dtype), rank), 1)


def cached(gpu: Gpu) -> Iterator[Launch]:
    """What writes caches: every format, with norms of heads and without, heads that turn whole and in part."""
    positions, slots = ints(4), zeros(4, dtype=torch.int64)
    for dtype in CACHED:
        x = zeros(4, 48 * 128, dtype=dtype if dtype in (F32, F16) else BF16)
        store, table = allocate(PlainLayout(16, 8, 128, array_dtype(dtype)), 1), zeros(64, 2, 64, dtype=F32)
        for name, norms in (("", None), (", norms", (zeros(128, dtype=F32), zeros(128, dtype=F32)))):
            yield (
                f"{NAMES[dtype]}{name}",
                partial(caches.rope_and_cache, gpu, x, positions, table, slots, store, norms, 1e-6),
            )
    part, store = zeros(64, 2, 16, dtype=F32), allocate(PlainLayout(16, 8, 80, array_dtype(BF16)), 1)
    yield (
        "bf16, part",
        partial(caches.rope_and_cache, gpu, zeros(4, 48 * 80), positions, part, slots, store, None, 1e-6),
    )
    still, store = zeros(64, 2, 0, dtype=F32), allocate(PlainLayout(16, 8, 64, array_dtype(BF16)), 1)
    yield (
        "bf16, none turns",
        partial(caches.rope_and_cache, gpu, zeros(4, 24 * 64), positions, still, slots, store, None, 1.0),
    )
    yield "bf16, none turns", partial(caches.rope_queries, gpu, zeros(4, 512), positions, still, 16, 64, None, 1.0)
    table = zeros(64, 2, 64, dtype=F32)
    yield "bf16", partial(caches.rope_queries, gpu, zeros(4, 4096), positions, table, 16, 128, None, 1e-6)
    heads = LatentHeads(16, zeros(512, dtype=F32))
    for dtype in (BF16, F32):
        yield f"latents, {NAMES[dtype]}", partial(
            caches.latent_rope_and_cache, gpu, zeros(4, 16 * 192, dtype=dtype), zeros(4, 576, dtype=dtype), positions,
            zeros(64, 2, 32, dtype=F32), slots, latent_cache(512, dtype), heads,
        )  # fmt: skip
    yield "blocks", partial(caches.copy_blocks, gpu, [store], ((0, 0),))
    yield "blocks", partial(caches.zero_blocks, gpu, [store], (0,))
    yield "blocks", partial(caches.move_slots, gpu, [store], ((0, 1),))


def convolutions(gpu: Gpu) -> Iterator[Launch]:
    """LFM2's, with gates, and those before recurrent states: four taps, a bias and SiLU; drafts that branch."""
    for dtype in (BF16, F16, F32):
        store = allocate(RowLayout.of(16, 2048, array_dtype(dtype)), 1)
        for name, taps, gated, tree in (("gated", 3, True, None), ("tree", 3, True, zeros(4, dtype=torch.int64)),
                                        ("silu", 4, False, None)):  # fmt: skip
            weight = zeros(taps, 2048, dtype=F32)
            conv = Convolution(weight, None if gated else weight[0], "" if gated else "silu", gated)
            yield f"{name}, {NAMES[dtype]}", partial(
                convolution.causal_conv, gpu, zeros(4, 2048 * (3 if gated else 1), dtype=dtype), store,
                zeros(4, dtype=torch.int64), (ints(5), ints(4), ints(4, 512)), conv, tree,
            )  # fmt: skip


def row_by_row(gpu: Gpu) -> Iterator[Launch]:
    """Norms, activations and the moves of rows."""
    d, weight, positions = 4096, zeros(4096, dtype=F32), ints(4)
    for dtype in (BF16, F16, F32):
        x, name = zeros(4, d, dtype=dtype), NAMES[dtype]
        yield f"rms, {name}", partial(rowwise.rmsnorm, gpu, x, weight, 1e-6)
        yield f"add, rms, {name}", partial(rowwise.add_rmsnorm, gpu, x, x, weight, 1e-6)
        yield f"layer, {name}", partial(rowwise.layernorm, gpu, x, weight, weight, 1e-6)
        yield f"add, layer, {name}", partial(rowwise.add_layernorm, gpu, x, x, weight, None, 1e-6)
        yield name, partial(rowwise.embedding, gpu, positions, zeros(8, d, dtype=dtype))
        yield f"positions, {name}", partial(rowwise.add_positions, gpu, x, positions, zeros(8, d, dtype=dtype), 2)
        yield name, partial(rowwise.take_rows, gpu, x, x, positions)
        yield name, partial(rowwise.add, gpu, x, x)
        yield name, partial(rowwise.join_columns, gpu, (x, x))
        yield f"silu, {name}", partial(rowwise.gated_activation, gpu, zeros(4, 2 * d, dtype=dtype), "silu")
    x = zeros(4, d)
    for kind in ACTIVATIONS:
        yield f"{kind}, bf16", partial(rowwise.gated_activation, gpu, zeros(4, 2 * d), kind)
        yield f"{kind}, bf16", partial(rowwise.activation, gpu, x, kind)
    yield "scale", partial(rowwise.scale, gpu, x, 0.5)
    yield "scale", partial(rowwise.scale_rows, gpu, x, zeros(4, 1, dtype=F32), d)
    yield "scale by position", partial(rowwise.scale_rows, gpu, x, zeros(8, dtype=F32), d, positions, 8192, 1)
    yield "cap", partial(rowwise.softcap, gpu, x, 30.0)
    yield "clip", partial(rowwise.clip, gpu, x, 30.0)
    yield "xielu", partial(rowwise.xielu, gpu, x, 0.8, 0.8, 0.5)
    yield "heads", partial(rowwise.norm_spans, gpu, x, weight, 0, 128, False, 1e-6)
    yield "heads, centered", partial(rowwise.norm_spans, gpu, x, weight, 0, 128, True, 1e-6)


def several_streams(gpu: Gpu) -> Iterator[Launch]:
    """What Hy4 reads of streams and adds to them, Gemma 3n's mixtures, and gates of its MLP."""
    for dtype in (BF16, F32):
        name = NAMES[dtype]
        for kind, h, n, out, p in (("read", 2816, 4, 1, 8), ("write", 2816, 1, 4, 8), ("all", 2048, 4, 4, 4)):
            x, m = zeros(4, n * h, dtype=dtype), zeros(4, p, dtype=dtype)
            given = zeros(out * n, p, dtype=F32), zeros(out * n, dtype=F32), out
            yield f"{kind}, {name}", partial(streams.mix_streams, gpu, x, m, *given)
        yield name, partial(streams.match_lengths, gpu, zeros(4, 4 * 2048, dtype=dtype), 4, 1e-5)
        yield name, partial(streams.sparse_gate, gpu, zeros(4, 2 * 8192, dtype=dtype), 1.64)


def recurrences(gpu: Gpu) -> Iterator[Launch]:
    """Rows over states: Qwen3.5, Kimi Linear, GLM-5-Next, Nemotron-H, Falcon Mamba; and the norms behind them."""
    batch = StateBatch(ints(3), ints(2), ints(2, 2), ints(2, 2))
    one, channels = (DeltaSpec(16, 32, 128, 128, zeros(32, dtype=F32), zeros(n, dtype=F32)) for n in (32, 4096))
    bounded = DeltaSpec(16, 32, 128, 128, one.a, channels.dt_bias, -5.0)
    heads = zeros(64, dtype=F32)
    mamba2 = ScanSpec(64, 64, 128, heads, heads, heads, 8)
    wide = zeros(4096, dtype=F32)
    mamba1 = ScanSpec(1, 4096, 16, zeros(16, 4096, dtype=F32), wide, wide)
    states = zeros(4, 32, 128, 128, dtype=F32)
    for dtype in (BF16, F32):
        name, x = NAMES[dtype], zeros(4, one.width, dtype=dtype)
        gates, decay = zeros(4, 64, dtype=dtype), zeros(4, 4096, dtype=dtype)
        yield f"heads, {name}", partial(recurrent.delta_rule, gpu, x, gates, None, states, batch, one)
        given = zeros(4, 32, dtype=dtype), decay, states, batch
        yield f"channels, {name}", partial(recurrent.delta_rule, gpu, x, *given, channels)
        yield f"bounded, {name}", partial(recurrent.delta_rule, gpu, x, *given, bounded)
        small = zeros(4, 64, 128, 64, dtype=F32)
        x = zeros(4, 64 * 64 + 2 * 8 * 128, dtype=dtype)
        yield f"heads, {name}", partial(recurrent.ssm_scan, gpu, x, None, gates, small, batch, mamba2)
        rows, small = zeros(4, 4096, dtype=dtype), zeros(4, 1, 16, 4096, dtype=F32)
        pairs = zeros(4, 32, dtype=dtype)
        yield f"channels, {name}", partial(recurrent.ssm_scan, gpu, rows, pairs, rows, small, batch, mamba1)
        for gate, first, weight in (("silu", False, wide[:128]), ("sigmoid", False, wide[:128]), ("silu", True, wide)):
            label, span = f"{gate}{', first' if first else ''}, {name}", 512 if first else 128
            yield label, partial(recurrent.gated_rmsnorm, gpu, rows, rows, weight, span, gate, first, 1e-6)
        yield f"gate alone, {name}", partial(recurrent.gated_rmsnorm, gpu, rows, rows, None, 4096, "silu", False, 1e-6)


def adapters(gpu: Gpu) -> Iterator[Launch]:
    """LoRA of ranks below and above a tile."""
    for rank, dtype in ((16, BF16), (64, BF16), (16, F32)):
        a, b = zeros(4, rank, 4096, dtype=F32), zeros(4, rank, 4096, dtype=F32)
        x = zeros(4, 4096, dtype=dtype)
        y = torch.zeros_like(x)
        yield f"rank {rank}, {NAMES[dtype]}", partial(rowwise.lora, gpu, x, y, a, b, ints(4), 0)
        yield f"factors, {NAMES[dtype]}", partial(rowwise.lora_scale, gpu, y, zeros(4, 1, 4096, dtype=F32), ints(4))


def samplers(gpu: Gpu) -> Iterator[Launch]:
    """Vocabularies beyond a block, and within one."""
    for vocabulary in (128256, 512):
        logits, name = zeros(1, vocabulary, dtype=F32), f"{vocabulary:,} tokens"
        edits: list[Any] = [RowEdits(0, banned=np.zeros(1, np.int32))]
        yield name, partial(sampling.sample, gpu, logits, np.zeros(1, DRAW))
        yield name, partial(sampling.top_logprobs, gpu, logits, np.zeros(1, QUERY), 5)
        yield name, partial(sampling.penalize, gpu, logits, edits)
