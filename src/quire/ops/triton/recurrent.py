"""The GPU backend's side of the ops of recurrent.py."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from quire.ops.op import impl
from quire.ops.recurrent import DeltaSpec, ScanSpec, StateBatch
from quire.ops.triton import recurrent_kernels as kernels
from quire.ops.triton.checks import activations, tensor
from quire.ops.triton.gpu import Gpu
from quire.ops.triton.rowwise import warps

F32, I32 = torch.float32, torch.int32
TILE_NUMBERS = 4096
"""Of a state, that a program keeps in registers."""


@impl("delta_rule", "triton")
def delta_rule(
    gpu: Gpu, qkv: Tensor, gates: Tensor, decay: Tensor | None, states: Tensor, batch: StateBatch, spec: DeltaSpec
) -> tuple[Tensor, Tensor]:
    heads, dk, dv = spec.value_heads, spec.key_dim, spec.value_dim
    if spec.key_heads < 1 or heads % spec.key_heads:
        raise ValueError(f"delta_rule: {heads} value heads are not a multiple of {spec.key_heads} key heads")
    rows = activations(qkv, "delta_rule qkv", -1, spec.width)[0]
    activations(gates, "delta_rule gates", rows, 2 * heads if decay is None else heads)
    if decay is not None:
        activations(decay, "delta_rule decay", rows, heads * dk)
    tensor(spec.a, "delta_rule a", F32, heads)
    tensor(spec.dt_bias, "delta_rule dt_bias", F32, heads if decay is None else heads * dk)
    step, moves = _slot_step("delta_rule", states, heads, dk, dv), _moves("delta_rule", batch)
    out = gpu.empty(rows, heads * dv, dtype=qkv.dtype)
    keys, columns = _tile(dk, dv)
    kernels.delta_kernel[(len(batch.source), heads, cdiv(dv, columns))](
        out, qkv, gates, decay, states, *moves, spec.a, spec.dt_bias, spec.key_heads, heads, dk, dv, len(states), step,
        rows, dk**-0.5, float(spec.lower_bound), float(spec.beta_scale), BK=keys, BV=columns,
        BOUNDED=spec.lower_bound < 0,
    )  # fmt: skip
    return states, out


@impl("ssm_scan", "triton")
def ssm_scan(
    gpu: Gpu, x: Tensor, bc: Tensor | None, dt: Tensor | None, states: Tensor, batch: StateBatch, spec: ScanSpec
) -> tuple[Tensor, Tensor]:
    n, p, inner, pairs = spec.state, spec.head_dim, spec.inner, 2 * spec.groups * spec.state
    if spec.groups < 1 or spec.heads % spec.groups or (spec.selective and spec.heads != 1):
        raise ValueError(
            f"ssm_scan: {spec.heads} heads do not share {spec.groups} groups, or have time steps of channels"
        )
    rows, width = activations(x, "ssm_scan x", -1, inner + (pairs if bc is None else 0))
    if bc is not None:
        activations(bc, "ssm_scan bc", rows, pairs)
    if dt is not None:
        activations(dt, "ssm_scan dt", rows, spec.steps)
    elif spec.selective:
        raise ValueError("ssm_scan: channels with their own time steps need these")
    tensor(spec.a, "ssm_scan a", F32, *((n, p) if spec.selective else (spec.heads,)))
    for name, numbers in (("d", spec.d), ("dt_bias", spec.dt_bias)):
        if numbers is not None:
            tensor(numbers, f"ssm_scan {name}", F32, spec.steps)
    step, moves = _slot_step("ssm_scan", states, spec.heads, n, p), _moves("ssm_scan", batch)
    out = gpu.empty(rows, inner, dtype=x.dtype)
    numbers, columns = _tile(n, p)
    kernels.scan_kernel[(len(batch.source), spec.heads, cdiv(p, columns))](
        out, x, x[:, inner:] if bc is None else bc, dt, states, *moves, spec.a, spec.d, spec.dt_bias, spec.heads,
        spec.groups, n, p, len(states), step, rows, width, width if bc is None else pairs, float(spec.low),
        float(spec.high), BN=numbers, BP=columns, SELECTIVE=spec.selective,
    )  # fmt: skip
    return states, out


@impl("gated_rmsnorm", "triton")
def gated_rmsnorm(
    gpu: Gpu, x: Tensor, z: Tensor, weight: Tensor | None, span: int, gate: str, gate_first: bool, eps: float
) -> Tensor:
    rows, width = activations(x, "gated_rmsnorm x")
    if z.dtype is not x.dtype or z.shape != x.shape or (x.numel() > rows and z.stride(1) != 1):
        raise ValueError(
            f"gated_rmsnorm z: need [{rows}, {width}] of {x.dtype}, numbers of a row side by side, got {z.dtype} "
            f"{list(z.shape)} with strides {list(z.stride())}"
        )
    if gate not in ("silu", "sigmoid"):
        raise ValueError(f"gated_rmsnorm: the gate {gate!r} is not one of silu, sigmoid")
    if span < 1 or width % span:
        raise ValueError(f"gated_rmsnorm: rows of {width} numbers are not spans of {span}")
    weights = span if weight is None else len(tensor(weight, "gated_rmsnorm weight", F32, -1))
    if weights not in (span, width):
        raise ValueError(f"gated_rmsnorm: {weights} weights are neither a span's {span} nor a row's {width}")
    if x.numel():
        runs, size = width // span, next_power_of_2(span)
        together = max(1, min(next_power_of_2(runs), 4096 // size))
        kernels.gated_norm_kernel[(rows, cdiv(runs, together))](
            x, z, weight, width, z.stride(0), runs, span, weights, eps, BR=together, BS=size,
            SIGMOID=gate == "sigmoid", GATE_FIRST=gate_first, num_warps=warps(size * together),
        )  # fmt: skip
    return x


def _tile(dk: int, dv: int) -> tuple[int, int]:
    """Numbers of a key, padded, and columns of a program's tile."""
    keys = next_power_of_2(dk)
    return keys, max(1, min(next_power_of_2(dv), TILE_NUMBERS // keys))


def _slot_step(what: str, states: Tensor, heads: int, dk: int, dv: int) -> int:
    """Numbers from one slot of `states` to the next; a slot's own lie without gaps."""
    fits = states.dtype is F32 and states.dim() == 4 and states.shape[1:] == (heads, dk, dv)
    if not fits or (len(states) and not states[0].is_contiguous()):
        raise ValueError(
            f"{what} states: need {F32} [slots, {heads}, {dk}, {dv}], a slot without gaps, got {states.dtype} "
            f"{list(states.shape)} with strides {list(states.stride())}"
        )
    return states.stride(0)


def _moves(what: str, batch: StateBatch) -> tuple[Tensor, ...]:
    """The arrays of `batch`, on the device."""
    sequences = len(tensor(batch.source, f"{what} source", I32, -1))
    return (
        tensor(batch.cu_q, f"{what} cu_q", I32, sequences + 1),
        batch.source,
        tensor(batch.counts, f"{what} counts", I32, sequences, 2),
        tensor(batch.target, f"{what} target", I32, sequences, 2),
    )
