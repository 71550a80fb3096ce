"""A mixture of experts in place of the MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from quire.model.net.parts import Linear, Mlp, Norm, Product
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.experts import Choices, ExpertActivation, Grouped, Routing

Experts = Callable[[Ops, Array, Choices], Array]
"""rows [T, hidden] f32 and choices [R, top_k] of them, of experts of this process -> the weighted sums [R, hidden] f32
of the experts' outputs."""

Holders = Callable[[Ops, Experts, Array, Array, Array], Array]
"""Has those compute who hold them: this process's experts, rows [T, hidden] f32, the experts int32 [T, top_k] that each
row chose, of all there are, and their weights f32 -> the weighted sums [T, hidden] f32."""


@dataclass(frozen=True)
class LocalExperts:
    """All experts, `count` of them, are this process's; `idle` choices behind them are of none, and weigh 0."""

    count: int
    idle: int = 0

    def __call__(self, ops: Ops, own: Experts, x: Array, ids: Array, weights: Array) -> Array:
        """Implement `Holders`."""
        tokens, places, offsets = ops.sort_by_expert(ids, self.count + self.idle)
        return own(ops, x, (tokens, places, offsets[:, : self.count + 1], weights))


@dataclass(frozen=True)
class FusedExperts:
    """Gated MLPs in one call."""

    gate_up: Grouped
    down: Grouped
    between: ExpertActivation

    def __call__(self, ops: Ops, x: Array, choices: Choices) -> Array:
        """Implement `Experts`."""
        return ops.expert_mlp(x, self.gate_up, self.down, self.between, choices)


@dataclass(frozen=True)
class PairByPair:
    """Experts of which some choices are none: outputs are made for each pair by itself, and then summed."""

    own: Experts

    def __call__(self, ops: Ops, x: Array, choices: Choices) -> Array:
        """Implement `Experts`."""
        tokens, places, offsets, weights = choices
        pairs = np.arange(tokens.shape[0] * tokens.shape[1], dtype=np.int32)[:, None]
        once = ops.put(pairs), offsets, ops.put(np.ones(pairs.shape, np.float32))
        y = self.own(ops, x, (tokens.reshape(-1, 1), *once))
        summed: Array = ops.combine(y, places, weights)
        return summed


@dataclass(frozen=True)
class GivenBack:
    """Choices that give back the row itself (Jin et al. 2024, "MoE++").

    `experts` and `idle` f32 [choices]: 1 for those that are experts, and for the others. `sums`: the row of ones.
    """

    experts: Array
    idle: Array
    sums: Linear

    def divide(self, ops: Ops, ids: Array, weights: Array) -> tuple[Array, Array]:
        """weights [T, top_k] of the choices `ids` -> those of experts, others 0; the sum of the others [T, 1]."""
        own = ops.scale_choices(weights, ids, self.experts)
        return own, self.sums(ops, ops.scale_choices(weights, ids, self.idle))


@dataclass(frozen=True)
class CutExperts:
    """MLPs of experts op by op, for what `expert_mlp` does not take.

    `act`: [P, 2 f] -> [P, f], or [P, f] -> [P, f] where experts have no gate.
    """

    gate_up: Grouped
    down: Grouped
    act: Callable[[Ops, Array], Array]

    def __call__(self, ops: Ops, x: Array, choices: Choices) -> Array:
        """Implement `Experts`."""
        tokens, places, offsets, weights = choices
        inner = self.act(ops, ops.grouped_linear(x, self.gate_up, tokens, offsets))
        y = ops.grouped_linear(inner, self.down, None, offsets)
        return ops.combine(y, places, weights)


@dataclass(frozen=True)
class CappedRouter:
    """A router whose logits are cap * tanh(logit / cap)."""

    own: Product
    cap: float

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, hidden] -> [T, experts]."""
        return ops.softcap(self.own(ops, x), self.cap)


@dataclass(frozen=True)
class MoeMlp:
    """y = sum of weight_e * expert_e(x) over the experts the router chooses, plus the shared expert's output, if any.

    `bias`: of the router's choice, f32 [experts], or None. `switch` scales the shared expert's output by a sigmoid
    (Qwen2-MoE). `latents`: matrices that lead to the rows that experts read, and back (Nemotron 3). `input_scores`: of
    the one expert that a row takes, what multiplies the row before it reads it (Llama 4); `routing` weighs it with 1.
    `scales` f32 [experts] multiply what experts make, `norm` is of the rows that they, not the router, read (Gemma 4).
    `back`: some choices give back the row; `gives`: this rank adds it, where ranks' results are summed. `table` [V,
    top_k] int32: the experts of each token, where these say which they are.
    """

    router: Product
    bias: Array | None
    routing: Routing
    experts: Experts
    holders: Holders
    shared: Mlp | None
    switch: Linear | None
    latents: tuple[Linear, Linear] | None = None
    input_scores: Routing | None = None
    scales: Array | None = None
    norm: Norm | None = None
    back: GivenBack | None = None
    gives: bool = True
    table: Array | None = None

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, hidden] -> [T, hidden]; where scores multiply rows, or some are given back, x is given up."""
        logits = self.router(ops, x)
        return self._made(ops, x, logits, *ops.route(logits, self.bias, self.routing))

    def by_token(self, ops: Ops, x: Array, tokens: Array) -> Array:
        """x [T, hidden] of `tokens` [T] int32 -> [T, hidden]."""
        logits = self.router(ops, x)
        return self._made(ops, x, logits, *ops.route_by_token(logits, tokens, self.table, self.routing))

    def _made(self, ops: Ops, x: Array, logits: Array, ids: Array, weights: Array) -> Array:
        if self.scales is not None:
            weights = ops.scale_choices(weights, ids, self.scales)
        given: Array | None = None
        if self.back is not None:
            weights, given = self.back.divide(ops, ids, weights)
        shared = None if self.shared is None else self.shared(ops, x)
        if shared is not None and self.switch is not None:
            shared = ops.scale_by_sigmoid(shared, self.switch(ops, x))
        if self.input_scores is not None:
            _, scores = ops.route(logits, self.bias, self.input_scores)
            x = ops.scale_rows(x, scores[:, 0], x.shape[1])
        if self.norm is not None:
            x = self.norm(ops, x)
        if self.latents is None:
            y = self.holders(ops, self.experts, x, ids, weights)
        else:
            enter, leave = self.latents
            y = leave(ops, self.holders(ops, self.experts, enter(ops, x), ids, weights))
        if given is not None and self.gives:
            y = ops.add(y, ops.scale_rows(x, given[:, 0], x.shape[1]))
        return y if shared is None else ops.add(y, shared)


@dataclass(frozen=True)
class NormedRouter:
    """A router that reads rows with a norm of their own."""

    norm: Norm
    linear: Linear

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, hidden] -> [T, experts]."""
        return self.linear(ops, self.norm(ops, x))


@dataclass(frozen=True)
class MoeBesideMlp:
    """An MLP and experts that read the same stream, each with norms before and after it, added (Gemma 4).

    The norm before the experts, and the router's, are theirs.
    """

    mlp_norm: Norm
    mlp: Mlp
    mlp_post_norm: Norm
    experts: Mlp
    expert_post_norm: Norm

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, hidden], not normed -> [T, hidden]."""
        dense = self.mlp_post_norm(ops, self.mlp(ops, self.mlp_norm(ops, x)))
        added: Array = ops.add(dense, self.expert_post_norm(ops, self.experts(ops, x)))
        return added


@dataclass(frozen=True)
class MlpAndExperts:
    """An MLP and experts that read the same rows, whose results stay apart (`net.passing`)."""

    mlp: Mlp
    experts: Mlp

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, hidden], which may be given up -> [T, 2 * hidden], of the MLP and of the experts."""
        dense = self.mlp(ops, x)
        joined: Array = ops.join_columns((dense, self.experts(ops, x)))
        return joined


BESIDE = (MoeBesideMlp, MlpAndExperts)
"""What has an MLP and experts."""


def experts_of(mlp: Mlp) -> MoeMlp | None:
    """The experts of a layer, by themselves or beside an MLP, where it has any."""
    own = mlp.experts if isinstance(mlp, BESIDE) else mlp
    return own if isinstance(own, MoeMlp) else None


def with_experts(mlp: Mlp, experts: Mlp) -> Mlp:
    """`mlp` with other experts."""
    return replace(mlp, experts=experts) if isinstance(mlp, BESIDE) else experts
