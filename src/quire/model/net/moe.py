"""A mixture of experts in place of the MLP: its part of a layer, and how it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.model.load.roles import DISK_ROLES
from quire.model.net.linear import Linear
from quire.model.net.parts import GatedMlp
from quire.model.spec import ModelSpec
from quire.ops.backend import Ops
from quire.ops.moe import Grouped, padded_rows
from quire.ops.routing import Routing
from quire.ops.weights import Packed, labelled
from quire.quant.base import QWeight

if TYPE_CHECKING:
    from quire.model.load.loader import Loader


@dataclass(frozen=True)
class MoeMlp:
    """y = sum of weight_e * expert_e(x) over the experts the router chooses, plus the shared expert's output, if any.

    `bias`: of the router's choice, f32 [experts], or None. `act`: [P, 2 f] -> [P, f]. `switch` scales the shared
    expert's output by a sigmoid (Qwen2-MoE).
    """

    router: Linear
    bias: Tensor | None
    routing: Routing
    gate_up: Grouped
    act: Callable[[Ops, Tensor], Tensor]
    down: Grouped
    shared: GatedMlp | None
    switch: Linear | None

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        ids, weights = ops.route(self.router(ops, x), self.bias, self.routing)
        tokens, places, offsets = ops.sort_by_expert(ids, self.routing.experts)
        inner = self.act(ops, ops.grouped_linear(x, self.gate_up, tokens, offsets))
        y = ops.combine(ops.grouped_linear(inner, self.down, None, offsets), places, weights)
        if self.shared is None:
            return y  # type: ignore[no-any-return]
        shared = self.shared(ops, x)
        if self.switch is not None:
            shared = ops.scale_by_sigmoid(shared, self.switch(ops, x))
        return ops.add(y, shared)  # type: ignore[no-any-return]


def load_moe(loader: Loader, index: int) -> MoeMlp:
    """The experts of layer `index`, packed."""
    spec, claim = loader.opened.spec, loader.opened.claim
    shared = switch = None
    if spec.moe.shared:
        gate_up = loader.linear(("shared_gate", "shared_up"), index)
        shared = GatedMlp(gate_up, loader.linear(("shared_down",), index), spec.activation)
    if claim.get("shared_switch", index):
        switch = loader.dense("shared_switch", index)
    return MoeMlp(
        loader.dense("router", index),
        loader.vector("router_bias", index),
        spec.moe.routing,
        _grouped(loader, ("expert_gate", "expert_up"), index),
        activation(spec),
        _grouped(loader, ("expert_down",), index),
        shared,
        switch,
    )


def activation(spec: ModelSpec) -> Callable[[Ops, Tensor], Tensor]:
    """What stands between up and down of an expert."""
    kind, clamp = spec.activation, spec.moe.clamp
    if clamp is None:
        return lambda ops, x: ops.gated_activation(x, kind)
    alpha, limit = clamp
    return lambda ops, x: ops.clamped_swiglu(x, alpha, limit)


def _grouped(loader: Loader, roles: tuple[str, ...], index: int) -> Grouped:
    """One matrix of every expert. They are packed as one: a buffer each would be too small for huge pages."""
    experts, spec = loader.opened.spec.moe.routing.experts, loader.opened.spec
    name, widths = f"{index}.{'+'.join(roles)}", [DISK_ROLES[role].shape(spec) for role in roles]
    height = sum(n for n, _ in widths)
    kept = None
    if loader.cache is not None:
        kept = loader.cache.get(name, experts * len(padded_rows(height)), widths[0][1])
    if kept is not None and (kept.bias is None or kept.bias.numel() == experts * height):
        bias = None if kept.bias is None else kept.bias.view(experts, height)
        return _counted(loader, roles, kept.label, kept.packed, bias)
    parts = [loader.matrix(roles, index, e) for e in range(experts)]
    n = parts[0][0].shape[0]
    whole = QWeight.cat_rows([w if n == len(padded_rows(n)) else w.take_rows(padded_rows(n)) for w, _ in parts])
    packed = whole.pack(loader.ops)
    biases = [b for _, b in parts if b is not None]
    bias = torch.stack(biases) if biases else None
    if loader.cache is not None:
        loader.cache.put(name, packed, bias)
    return _counted(loader, roles, labelled(whole.label, packed), packed, bias)


def _counted(loader: Loader, roles: tuple[str, ...], label: str, packed: Packed, bias: Tensor | None) -> Grouped:
    """The experts' matrices as the kernels want them, entered in the account."""
    spec = loader.opened.spec
    if bias is not None:
        loader.count("biases", "f32", bias.nbytes)
    loader.count("+".join(roles), label, packed.nbytes)
    height = sum(DISK_ROLES[role].shape(spec)[0] for role in roles)
    return loader.ops.group(packed, spec.moe.routing.experts, height, bias)
