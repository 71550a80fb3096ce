"""The CPU backend's side of the ops of moe.py."""

from __future__ import annotations

from quire.core.dtypes import F32, I32
from quire.ops.arrays import Host, address
from quire.ops.cpu.descriptor_cache import address_or_none, between_descriptor, experts_descriptor, routing_descriptor
from quire.ops.cpu.state import Cpu
from quire.ops.descriptors import PairsDescriptor
from quire.ops.experts import Choices, ExpertActivation, Grouped, Routing
from quire.ops.facts import LANES
from quire.ops.native import check
from quire.ops.op import impl

MOST_EXPERTS = 1 << 20


@impl("route", "cpu")
def route(cpu: Cpu, logits: Host, bias: Host | None, routing: Routing) -> tuple[Host, Host]:
    rows = check(logits, "route logits", F32, -1, routing.experts).shape[0]
    at_bias = None if bias is None else check(bias, "route bias", F32, routing.experts)
    ids, weights = cpu.arena.empty(rows, routing.top_k, I32), cpu.arena.empty(rows, routing.top_k)
    scratch = cpu.arena.empty(rows, 2 * routing.experts)
    if rows:
        cpu.call("route", ids, weights, scratch, logits, at_bias, routing_descriptor(routing), rows)
    return ids, weights


@impl("route_by_token", "cpu")
def route_by_token(cpu: Cpu, logits: Host, tokens: Host, table: Host, routing: Routing) -> tuple[Host, Host]:
    rows = check(logits, "route_by_token logits", F32, -1, routing.experts).shape[0]
    check(tokens, "route_by_token tokens", I32, rows)
    known = check(table, "route_by_token table", I32, -1, routing.top_k).shape[0]
    ids, weights = cpu.arena.empty(rows, routing.top_k, I32), cpu.arena.empty(rows, routing.top_k)
    if rows:
        where = logits, tokens, table
        cpu.call("route_by_token", ids, weights, *where, routing_descriptor(routing), rows, known)
    return ids, weights


@impl("scale_choices", "cpu")
def scale_choices(cpu: Cpu, weights: Host, ids: Host, scales: Host) -> Host:
    rows, top_k = check(weights, "scale_choices weights", F32, -1, -1).shape
    check(ids, "scale_choices ids", I32, rows, top_k)
    experts, out = len(check(scales, "scale_choices scales", F32, -1)), cpu.arena.empty(rows, top_k)
    if rows:
        cpu.call("scale_choices", out, weights, ids, scales, rows * top_k, experts)
    return out


@impl("sort_by_expert", "cpu")
def sort_by_expert(cpu: Cpu, ids: Host, experts: int) -> tuple[Host, Host, Host]:
    rows, top_k = check(ids, "sort_by_expert ids", I32, -1, -1).shape
    if not 1 <= experts <= MOST_EXPERTS:
        raise ValueError(f"sort_by_expert: {experts} experts; their number must lie in [1, {MOST_EXPERTS:,}]")
    tokens, places = cpu.arena.empty(rows, top_k, I32), cpu.arena.empty(rows, top_k, I32)
    offsets = cpu.arena.empty(1, experts + 1, I32)
    if rows:
        where = tokens, places, offsets, ids
        cpu.call("sort_by_expert", *where, rows, top_k, experts)
    else:
        offsets[:] = 0
    return tokens, places, offsets


@impl("grouped_linear", "cpu")
def grouped_linear(cpu: Cpu, x: Host, w: Grouped, tokens: Host | None, offsets: Host) -> Host:
    count = check(x, "grouped_linear x", F32, -1, w.k).shape[0]
    check(offsets, "grouped_linear offsets", I32, 1, w.experts + 1)
    pairs = count
    if tokens is not None:
        pairs = check(tokens, "grouped_linear tokens", I32, -1, -1).size
    out = cpu.arena.empty(pairs, w.n)
    if pairs:
        described = PairsDescriptor(
            tokens=address_or_none(tokens), offsets=address(offsets), room=pairs, x_rows=count, top_k=1
        )
        cpu.call("grouped_linear", out, x, experts_descriptor(cpu, w), described)
    return out


@impl("expert_mlp", "cpu")
def expert_mlp(cpu: Cpu, x: Host, gate_up: Grouped, down: Grouped, between: ExpertActivation, choices: Choices) -> Host:
    tokens, places, offsets, weights = choices
    rows, top_k = check(places, "expert_mlp places", I32, -1, -1).shape
    if gate_up.n != 2 * down.k or down.experts != gate_up.experts:
        raise ValueError(
            f"expert_mlp: {gate_up.experts} matrices [{gate_up.n}, {gate_up.k}] and {down.experts} of "
            f"[{down.n}, {down.k}] do not fit each other"
        )
    x_rows = check(x, "expert_mlp x", F32, -1, gate_up.k).shape[0]
    check(tokens, "expert_mlp tokens", I32, rows, top_k)
    check(weights, "expert_mlp weights", F32, rows, top_k)
    check(offsets, "expert_mlp offsets", I32, 1, gate_up.experts + 1)
    out, work = cpu.arena.empty(rows, down.n), cpu.arena.empty(rows * top_k, down.n)
    if rows:
        pairs = PairsDescriptor(
            tokens=address(tokens), places=address(places), offsets=address(offsets), weights=address(weights),
            room=rows * top_k, x_rows=x_rows, top_k=top_k,
        )  # fmt: skip
        matrices = experts_descriptor(cpu, gate_up), experts_descriptor(cpu, down)
        cpu.call("expert_mlp", out, work, x, *matrices, between_descriptor(between), pairs)
    return out


def fuses_experts(down: Grouped) -> bool:
    """Whether the native `expert_mlp` takes experts whose last matrices are these: whole blocks, columns in order."""
    return down.k % LANES == 0 and not down.packed.handle.order


@impl("combine", "cpu")
def combine(cpu: Cpu, y: Host, places: Host, weights: Host) -> Host:
    rows, top_k = check(places, "combine places", I32, -1, -1).shape
    check(weights, "combine weights", F32, rows, top_k)
    d = check(y, "combine y", F32, rows * top_k, -1).shape[1]
    out = cpu.arena.empty(rows, d)
    if rows:
        where = out, y, places, weights
        cpu.call("combine", *where, rows, top_k, d)
    return out


@impl("clamped_swiglu", "cpu")
def clamped_swiglu(
    cpu: Cpu, gate_up: Host, alpha: float, limit: float, shift: float = 1.0, most: float | None = None
) -> Host:
    rows, width = check(gate_up, "clamped_swiglu gate_up", F32, -1, -1).shape
    if width % 2:
        raise ValueError(f"clamped_swiglu: {width} columns are not a gate and an up part of one size")
    out = cpu.arena.empty(rows, width // 2)
    if rows:
        cpu.call("clamped_swiglu", out, gate_up, rows, width // 2, alpha, limit, shift, limit if most is None else most)
    return out


@impl("scale_by_sigmoid", "cpu")
def scale_by_sigmoid(cpu: Cpu, x: Host, gate: Host) -> Host:
    rows, d = check(x, "scale_by_sigmoid x", F32, -1, -1).shape
    check(gate, "scale_by_sigmoid gate", F32, rows, 1)
    if rows:
        cpu.call("scale_by_sigmoid", x, gate, rows, d)
    return x


@impl("scale_by_softplus", "cpu")
def scale_by_softplus(cpu: Cpu, x: Host, gate: Host) -> Host:
    rows, d = check(x, "scale_by_softplus x", F32, -1, -1).shape
    runs = check(gate, "scale_by_softplus gate", F32, rows, -1).shape[1]
    if not runs or d % runs:
        raise ValueError(f"scale_by_softplus: rows of {d} numbers are not {runs} runs of one length")
    if rows:
        cpu.call("scale_by_softplus", x, gate, rows * runs, d // runs)
    return x
