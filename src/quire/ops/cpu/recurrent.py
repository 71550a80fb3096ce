"""The CPU backend's side of the ops of recurrent.py."""

from __future__ import annotations

from quire.core.dtypes import F32, I32
from quire.ops.arrays import Host, address
from quire.ops.cpu.descriptor_cache import address_or_none
from quire.ops.cpu.state import Cpu
from quire.ops.descriptors import DeltaDescriptor, GatedNormDescriptor, ScanDescriptor, StateBatchDescriptor
from quire.ops.native import check
from quire.ops.op import impl
from quire.ops.recurrent import DeltaSpec, ScanSpec, StateBatch


@impl("delta_rule", "cpu")
def delta_rule(
    cpu: Cpu, qkv: Host, gates: Host, decay: Host | None, states: Host, batch: StateBatch, spec: DeltaSpec
) -> tuple[Host, Host]:
    heads, channels = spec.value_heads, spec.value_heads * spec.key_dim
    by = _delta_descriptor(cpu, spec, heads if decay is None else channels)
    rows = check(qkv, "delta_rule qkv", F32, -1, spec.width).shape[0]
    check(gates, "delta_rule gates", F32, rows, 2 * heads if decay is None else heads)
    if decay is not None:
        check(decay, "delta_rule decay", F32, rows, channels)
    step = _slot_step("delta_rule", states, heads, spec.key_dim, spec.value_dim)
    moves = _state_batch(cpu, "delta_rule", batch)
    out = cpu.arena.empty(rows, heads * spec.value_dim)
    cpu.call(
        "delta_rule", out, qkv, gates, decay, states, moves, by, rows, len(states), step
    )  # fmt: skip
    return states, out


@impl("ssm_scan", "cpu")
def ssm_scan(
    cpu: Cpu, x: Host, bc: Host | None, dt: Host | None, states: Host, batch: StateBatch, spec: ScanSpec
) -> tuple[Host, Host]:
    by, pairs = _scan_descriptor(cpu, spec), 2 * spec.groups * spec.state
    rows = check(x, "ssm_scan x", F32, -1, spec.inner + (pairs if bc is None else 0)).shape[0]
    if bc is not None:
        check(bc, "ssm_scan bc", F32, rows, pairs)
    if dt is not None:
        check(dt, "ssm_scan dt", F32, rows, spec.steps)
    step = _slot_step("ssm_scan", states, spec.heads, spec.state, spec.head_dim)
    moves = _state_batch(cpu, "ssm_scan", batch)
    out = cpu.arena.empty(rows, spec.inner)
    cpu.call(
        "ssm_scan", out, x, bc, dt, states, moves, by, rows, len(states), step
    )  # fmt: skip
    return states, out


@impl("gated_rmsnorm", "cpu")
def gated_rmsnorm(
    cpu: Cpu, x: Host, z: Host, weight: Host | None, span: int, gate: str, gate_first: bool, eps: float
) -> Host:
    rows, width = check(x, "gated_rmsnorm x", F32, -1, -1).shape
    if z.dtype != F32 or z.shape != x.shape or (x.size > rows and z.strides[1] != z.itemsize):
        raise ValueError(
            f"gated_rmsnorm z: need [{rows}, {width}] of {F32}, numbers of a row side by side, got {z.dtype} "
            f"{list(z.shape)} with strides of {list(z.strides)} bytes"
        )
    if gate not in ("silu", "sigmoid"):
        raise ValueError(f"gated_rmsnorm: the gate {gate!r} is not one of silu, sigmoid")
    if not 1 <= span <= max(width, 1) or width % span:
        raise ValueError(f"gated_rmsnorm: rows of {width} numbers are not spans of {span}")
    weights = 0 if weight is None else len(check(weight, "gated_rmsnorm weight", F32, -1))
    if weight is not None and weights not in (span, width):
        raise ValueError(f"gated_rmsnorm: {weights} weights are neither a span's {span} nor a row's {width}")
    if x.size:
        by = GatedNormDescriptor(
            weight=address_or_none(weight), span=span, weights=weights, sigmoid=int(gate == "sigmoid"),
            gate_first=int(gate_first), eps=eps,
        )  # fmt: skip
        cpu.call("gated_rmsnorm", x, z, by, rows, width, z.strides[0] // z.itemsize)
    return x


def _slot_step(what: str, states: Host, heads: int, dk: int, dv: int) -> int:
    """Numbers from one slot of `states` to the next; a slot's own lie without gaps."""
    size, fits = heads * dk * dv, states.dtype == F32 and states.ndim == 4 and states.shape[1:] == (heads, dk, dv)
    if not fits or (len(states) and not states[0].flags.c_contiguous):
        raise ValueError(
            f"{what} states: need {F32} [slots, {heads}, {dk}, {dv}], a slot without gaps, got {states.dtype} "
            f"{list(states.shape)} with strides of {list(states.strides)} bytes"
        )
    step = states.strides[0] // states.itemsize
    if len(states) > 1 and step < size:
        raise ValueError(f"{what} states: slots of {size} numbers lie {step} apart")
    return max(step, size)


def _state_batch(cpu: Cpu, what: str, batch: StateBatch) -> StateBatchDescriptor:
    """The moves of states of a step, the same for all of its layers."""
    found = cpu.state_batches.get(batch)
    if found is not None:
        return found
    sequences = len(check(batch.source, f"{what} source", I32, -1))
    check(batch.cu_q, f"{what} cu_q", I32, sequences + 1)
    check(batch.counts, f"{what} counts", I32, sequences, 2)
    check(batch.target, f"{what} target", I32, sequences, 2)
    made = cpu.state_batches[batch] = StateBatchDescriptor(
        cu_q=address(batch.cu_q), source=address(batch.source), counts=address(batch.counts),
        target=address(batch.target), sequences=sequences,
    )  # fmt: skip
    return made


def _delta_descriptor(cpu: Cpu, spec: DeltaSpec, biases: int) -> DeltaDescriptor:
    """A layer's delta rule; `biases`: one for each head, or for each channel."""
    found = cpu.delta_rules.get(spec)
    if found is None:
        _check_sizes("delta_rule", spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim)
        if spec.value_heads % spec.key_heads:
            raise ValueError(
                f"delta_rule: {spec.value_heads} value heads are not a multiple of {spec.key_heads} key heads"
            )
        check(spec.a, "delta_rule a", F32, spec.value_heads)
        found = cpu.delta_rules[spec] = DeltaDescriptor(
            a=address(spec.a), dt_bias=address(spec.dt_bias), key_heads=spec.key_heads, value_heads=spec.value_heads,
            key_dim=spec.key_dim, value_dim=spec.value_dim, lower_bound=spec.lower_bound, beta_scale=spec.beta_scale,
        )  # fmt: skip
    check(spec.dt_bias, "delta_rule dt_bias", F32, biases)
    return found


def _scan_descriptor(cpu: Cpu, spec: ScanSpec) -> ScanDescriptor:
    """A layer's selective scan."""
    found = cpu.scans.get(spec)
    if found is not None:
        return found
    _check_sizes("ssm_scan", spec.heads, spec.head_dim, spec.state, spec.groups)
    if spec.heads % spec.groups or (spec.selective and spec.heads != 1):
        raise ValueError(
            f"ssm_scan: {spec.heads} heads do not share {spec.groups} groups, or have time steps of channels"
        )
    check(spec.a, "ssm_scan a", F32, *((spec.state, spec.head_dim) if spec.selective else (spec.heads,)))
    for name, numbers in (("d", spec.d), ("dt_bias", spec.dt_bias)):
        if numbers is not None:
            check(numbers, f"ssm_scan {name}", F32, spec.steps)
    made = cpu.scans[spec] = ScanDescriptor(
        a=address(spec.a), d=address_or_none(spec.d), dt_bias=address_or_none(spec.dt_bias), heads=spec.heads,
        groups=spec.groups, head_dim=spec.head_dim, state=spec.state, selective=int(spec.selective),
        low=spec.low, high=spec.high,
    )  # fmt: skip
    return made


def _check_sizes(what: str, *sizes: int) -> None:
    if not all(1 <= size < 1 << 31 for size in sizes):
        raise ValueError(f"{what}: {list(sizes)} are not numbers of heads and of their channels")
