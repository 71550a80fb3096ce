"""A mixture of experts in place of the MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from quire.model.net.linear import Linear
from quire.model.net.parts import GatedMlp
from quire.ops.backend import Ops
from quire.ops.moe import Grouped
from quire.ops.routing import Routing


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
