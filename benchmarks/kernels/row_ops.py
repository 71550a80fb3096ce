"""Ops between the matrices, for `cpu_ops`: rows, and rows over recurrent states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from op_cases import reference as cases
from op_cases.convolution import convolution_case
from op_cases.indexer import index_case
from op_cases.mla import chosen_tokens, latent_case, reading
from op_cases.recurrent import delta_spec, scan_spec, state_batch
from op_cases.weights import normal
from quire.core.dtypes import BF16
from quire.ops.convolution import Convolution, RowLayout
from quire.ops.indexer import Choice, IndexLayout
from quire.ops.latents import LatentLayout
from quire.ops.layout import KVLayout
from quire.ops.recurrent import DeltaSpec, ScanSpec
from quire.ops.reference.caches import allocate

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 64
STATE_BYTES = 192 << 20
"""States of one measurement of a decode: more than the last-level cache of the machines in mind."""


@dataclass(frozen=True)
class Calls:
    """Calls of an op one after the other, each with arguments of its own; the bytes and the operations of one."""

    op: str
    case: str
    args: list[tuple[Any, ...]]
    size: float
    work: float = 0.0


def row_calls(g: torch.Generator) -> Iterator[Calls]:
    """Norms, activations, rotations: bound by memory or by the call itself."""
    d, f = 2048, 8192
    layout, gates = KVLayout(16, KV_HEADS, HEAD_DIM, BF16), Convolution(normal(g, 3, d), gated=True)
    for m in (1, 16, 512):
        norm = (normal(g, m, d), normal(g, m, d), torch.ones(d), 1e-5)
        qkv = normal(g, m, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        table, cache = cases.rope_table(m, HEAD_DIM // 2), allocate(layout, -(-m // 16))
        rope = (qkv, torch.arange(m, dtype=torch.int32), table, torch.arange(m), cache, None, 1e-5)
        gated = normal(g, m, d), normal(g, m, d), torch.ones(128), 128, "silu", False, 1e-6
        yield Calls("add_rmsnorm", f"m={m}", [norm], 16 * m * d)
        yield Calls("gated_activation", f"m={m}", [(normal(g, m, 2 * f), "silu")], 12 * m * f)
        yield Calls("xielu", f"m={m}", [(normal(g, m, f), 0.8, 0.8, 0.5)], 8 * m * f)
        yield Calls("gated_rmsnorm", f"m={m}", [gated], 12 * m * d)
        yield Calls("rope_and_cache", f"m={m}", [rope], 8 * qkv.numel())
        yield Calls("scale_rows", f"m={m}", [(normal(g, m, d), normal(g, m, 1), d)], 8 * m * d)
        conv = convolution_case(g, RowLayout.of(16, d, BF16), gates, ((m, m + 2),))
        yield Calls("causal_conv", f"m={m}", [tuple(conv.values())], 18 * m * d)


LAYERS: dict[str, Any] = {
    "Qwen3.5 16/32 x 128x128": lambda g: delta_spec(g, 16, 32, 128, 128),
    "Kimi 32 x 128x128": lambda g: delta_spec(g, 32, 32, 128, 128, True),
    "Mamba-2 64 x 128x64": lambda g: scan_spec(g, 64, 64, 128, 8),
    "Mamba-1 5120 x 16": lambda g: scan_spec(g, 1, 5120, 16, selective=True),
}
"""Layers with a recurrent state: heads x numbers of a key x of a value."""
BATCHES = {"decode 1": (1,), "decode 16": (1,) * 16, "4 drafts": (5,), "prefill 512": (512,)}


def recurrent_calls(g: torch.Generator) -> Iterator[Calls]:
    """Rows over states, which are read and written, with all of their bytes and operations."""
    for name, layer in LAYERS.items():
        spec = layer(g)
        for label, rows in BATCHES.items():
            shape = (
                (spec.value_heads, spec.key_dim, spec.value_dim)
                if isinstance(spec, DeltaSpec)
                else (spec.heads, spec.state, spec.head_dim)
            )
            each = torch.Size(shape).numel()
            layers = max(1, STATE_BYTES // (4 * each * len(rows))) if max(rows) == 1 else 1
            batch = state_batch(rows, range(len(rows)), [[(n, s)] for s, n in enumerate(rows)])
            states = [torch.randn(len(rows), *shape, generator=g) for _ in range(layers)]
            op, inputs, per_number = row_inputs(g, spec, sum(rows))
            size = 8 * each * len(rows) + 8 * inputs[0].numel()
            calls = [(*inputs, each_layer, batch, spec) for each_layer in states]
            yield Calls(op, f"{name}, {label}", calls, size, per_number * each * sum(rows))


def indexer_calls(g: torch.Generator) -> Iterator[Calls]:
    """The choice of 2,048 of 8,192 tokens by 64 heads (DeepSeek-V3.2), and attention of 16 heads to these."""
    keys, latents = IndexLayout.of(16, 128, BF16), LatentLayout(16, 1, 64, BF16, rank=512)
    context, most = 8192, 2048
    for name, new in (("decode 1 x 8192", 1), ("prefill 64 at 8192", 64)):
        choosing = index_case(g, keys, 64, Choice(most), ((new, context),))
        size, work = context * keys.bytes_per_token, 2 * 64 * 128 * context * new
        yield Calls("choose_tokens", name, [tuple(choosing.values())], size, work)
        case = latent_case(g, latents, 16, 192, ((new, context),))
        attending = reading(case, chosen_tokens(g, case, most))
        size, work = new * most * latents.bytes_per_token, 2 * 16 * new * most * (512 + 64 + 512)
        yield Calls("latent_attention", f"to chosen tokens, {name}", [tuple(attending.values())], size, work)


def row_inputs(g: torch.Generator, spec: DeltaSpec | ScanSpec, t: int) -> tuple[str, tuple[Any, ...], int]:
    """The op, its arguments with rows, and the operations of a row for each number of the state.

    The decay is one; a product that is added to the state, one that is read, and one that a delta is read by are two
    each. An exponential of Mamba-1 is twelve, five of its multiply-adds.
    """
    if isinstance(spec, DeltaSpec):
        channels = len(spec.dt_bias) > spec.value_heads
        gates = normal(g, t, spec.value_heads * (1 if channels else 2))
        decay = normal(g, t, spec.value_heads * spec.key_dim) if channels else None
        return "delta_rule", (normal(g, t, spec.width), gates, decay), 7
    pairs = 2 * spec.groups * spec.state
    return "ssm_scan", (normal(g, t, spec.inner + pairs), None, normal(g, t, spec.steps)), 17 if spec.selective else 5
