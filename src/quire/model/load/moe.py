"""The experts of a layer, from what the checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from quire.core.errors import ModelError
from quire.model.load.parts import load_norm
from quire.model.load.placement import Unplaced
from quire.model.load.reader import WeightReader
from quire.model.load.roles import DISK_ROLES
from quire.model.net.moe import (
    CappedRouter,
    CutExperts,
    Experts,
    FusedExperts,
    GivenBack,
    LocalExperts,
    MlpAndExperts,
    MoeBesideMlp,
    MoeMlp,
    NormedRouter,
    PairByPair,
)
from quire.model.net.parts import ClampedMlp, GatedMlp, Linear, Mlp, PlainMlp, Product, RmsNorm, scaled
from quire.model.spec import ModelSpec, MoE
from quire.ops.arrays import AnyArray, numbers, stack, to_numpy
from quire.ops.backend import Ops
from quire.ops.experts import ExpertActivation, Grouped, padded_rows
from quire.ops.weights import Packed, labelled
from quire.quant.base import QWeight


def load_moe(reader: WeightReader, index: int) -> MoeMlp:
    """The experts of layer `index`, packed."""
    spec, claim = reader.opened.spec, reader.opened.claim
    switch = latents = None
    if spec.moe.latent:
        latents = reader.linear(("expert_enter",), index), reader.linear(("expert_leave",), index)
    if claim.get("shared_switch", index):
        switch = reader.dense("shared_switch", index)
    scores, routing = spec.moe.input_scores, spec.moe.routing
    return MoeMlp(
        _router(reader, index),
        reader.vector("router_bias", index),
        replace(routing, experts=spec.moe.choices),
        _experts(reader, index),
        LocalExperts(routing.experts, spec.moe.idle),
        scaled(_shared(reader, index), spec.moe.shared_scale) if spec.moe.shared else _added(reader, index),
        switch,
        latents,
        replace(routing, score=scores, renormalize=False) if scores else None,
        reader.vector("expert_scale", index),
        load_norm(reader, "expert_norm", index) if claim.get("expert_norm", index) else None,
        _given_back(spec.moe, reader.ops) if spec.moe.idle else None,
        reader.share.rank == reader.share.world - 1 or not reader.share.cuts("expert_down"),
        _token_table(reader, index) if spec.moe.chosen_by_token(index) else None,
    )


def _added(reader: WeightReader, index: int) -> Mlp | None:
    """What is added to what experts make whatever they read: the bias of an MLP of zeros."""
    bias = reader.vector("experts_bias", index)
    if bias is None:
        return None
    upper, lower = (reader.ops.pack_exact(np.zeros(shape, np.float32)) for shape in ((1, len(bias)), (len(bias), 1)))
    return PlainMlp(Linear(upper), Linear(lower, bias), "relu")


def _token_table(reader: WeightReader, index: int) -> Unplaced:
    """The experts of each token in layer `index`."""
    table = to_numpy(reader.read(reader.opened.claim.get("token_experts", index)["weight"])).astype(np.int32)
    if table.min() < 0 or table.max() >= reader.opened.spec.moe.routing.experts:
        raise ModelError(f"{reader.opened.folder}: layer {index}: a table of tokens names experts that there are not")
    reader.count("token_experts", "i32", table.nbytes)
    return table


def _given_back(moe: MoE, ops: Ops) -> GivenBack:
    """How choices that give back rows are told from experts."""
    experts: Unplaced = (np.arange(moe.choices) < moe.routing.experts).astype(np.float32)
    idle: Unplaced = np.float32(1) - experts
    return GivenBack(experts, idle, Linear(ops.pack_exact(np.ones((1, moe.routing.top_k), np.float32))))


def load_beside(reader: WeightReader, index: int, dense: Mlp, experts: Mlp) -> MoeBesideMlp | MlpAndExperts:
    """An MLP and experts of layer `index` beside each other."""
    if reader.opened.spec.moe.late:
        return MlpAndExperts(dense, experts)
    before, after, behind = (
        load_norm(reader, role, index) for role in ("mlp_norm", "dense_post_norm", "expert_post_norm")
    )
    return MoeBesideMlp(before, dense, after, experts, behind)


def _router(reader: WeightReader, index: int) -> Product:
    """The router of layer `index`, whose logits may be capped, or which may have a norm: that of x, times a scale and
    hidden^-0.5."""
    own, scale = reader.dense("router", index), reader.vector("router_scale", index)
    spec = reader.opened.spec
    if scale is None:
        return CappedRouter(own, spec.moe.router_cap) if spec.moe.router_cap else own
    return NormedRouter(RmsNorm(scale * np.float32(spec.hidden**-0.5), spec.norm_eps), own)


def _shared(reader: WeightReader, index: int) -> Mlp:
    """The expert that every row takes, with a gate where the experts have one."""
    activation = reader.opened.spec.activation
    if not _gated(reader, index):
        return PlainMlp(reader.linear(("shared_up",), index), reader.linear(("shared_down",), index), activation)
    gate_up = reader.linear(("shared_gate", "shared_up"), index)
    down, clamp = reader.linear(("shared_down",), index), reader.opened.spec.moe.mlp_clamp_of(index)
    return GatedMlp(gate_up, down, activation) if clamp is None else ClampedMlp(gate_up, down, clamp)


def _gated(reader: WeightReader, index: int) -> bool:
    return bool(reader.opened.claim.get("expert_gate", index, 0))


def _experts(reader: WeightReader, index: int) -> Experts:
    spec, gated = reader.opened.spec, _gated(reader, index)
    gate_up = _grouped(reader, ("expert_gate", "expert_up") if gated else ("expert_up",), index)
    down = _grouped(reader, ("expert_down",), index)
    if not gated:
        return CutExperts(gate_up, down, lambda ops, x: ops.activation(x, spec.activation))
    if reader.ops.fuses_experts(down):
        fused = FusedExperts(gate_up, down, ExpertActivation(spec.activation, spec.moe.clamp_of(index)))
        return PairByPair(fused) if spec.moe.idle else fused
    return CutExperts(gate_up, down, activation(spec, index))


def activation(spec: ModelSpec, index: int) -> Callable[[Ops, Any], Any]:
    """What stands between up and down of an expert of layer `index`."""
    kind, clamp = spec.activation, spec.moe.clamp_of(index)
    if clamp is None:
        return lambda ops, x: ops.gated_activation(x, kind)
    return lambda ops, x: ops.clamped_swiglu(x, *clamp)


def _grouped(reader: WeightReader, roles: tuple[str, ...], index: int) -> Grouped:
    """One matrix of every expert that this rank has, packed as one: a buffer each would be too small for huge pages."""
    held, spec = reader.share.held(index, reader.opened.spec), reader.local
    experts = len(held)
    name, widths = f"{index}.{'+'.join(roles)}", [DISK_ROLES[role].shape(spec) for role in roles]
    height = sum(n for n, _ in widths)
    kept = None
    if reader.cache is not None:
        kept = reader.cache.get(name, experts * len(padded_rows(height)), widths[0][1])
    if kept is not None and (kept.bias is None or numbers(kept.bias) == experts * height):
        bias = None if kept.bias is None else kept.bias.reshape(experts, height)
        return _counted(reader, roles, kept.label, kept.packed, bias)
    biases = list[AnyArray]()

    def weights() -> Iterator[QWeight]:
        for expert in held:
            weight, bias = reader.matrix(roles, index, expert)
            biases.extend(() if bias is None else (bias,))
            yield weight if height == len(padded_rows(height)) else weight.take_rows(padded_rows(height))

    with reader.naming(f"experts of layer {index}"):
        label, packed = _stacked(reader.ops, weights(), experts)
    bias = stack(biases) if biases else None
    if reader.cache is not None:
        reader.cache.put(name, packed, bias)
    return _counted(reader, roles, label, packed, bias)


def _stacked(ops: Ops, weights: Iterator[QWeight], count: int) -> tuple[str, Packed]:
    """The matrices packed as one, and the format for reports; one at a time where the backend can."""
    first = next(weights)
    if ops.stacks(first.source(ops).kind):
        packed = ops.pack_stack((w.source(ops) for w in chain((first,), weights)), count)
        return labelled(first.label, packed), packed
    whole = QWeight.cat_rows([first, *weights])
    packed = whole.pack(ops)
    return labelled(whole.label, packed), packed


def _counted(
    reader: WeightReader, roles: tuple[str, ...], label: str, packed: Packed, bias: AnyArray | None
) -> Grouped:
    """The experts' matrices as the kernels want them, entered in the account."""
    spec = reader.local
    if bias is not None:
        reader.count("biases", "f32", bias.nbytes)
    reader.count("+".join(roles), label, packed.nbytes)
    height = sum(DISK_ROLES[role].shape(spec)[0] for role in roles)
    return reader.ops.group(packed, spec.moe.routing.experts, height, bias)
