"""Sizes and facts of the experts of a model."""

from __future__ import annotations

from dataclasses import dataclass

from quire.ops.experts import Clamp, Routing


@dataclass(frozen=True)
class MoE:
    """Experts in place of the MLP (Shazeer et al. 2017). Widths are those between up and down.

    `sparse`: per layer, whether it has experts. `shared`: width of the expert that every token takes, 0 = none;
    `shared_scale` multiplies what that one makes. `router_cap`: soft cap of the router's logits, 0 = none. `clamp`: of
    a limited activation, None = the model's; `clamps` and `mlp_clamps`: those of each layer's experts and of its other
    MLPs, where layers differ. `by_token`: layers whose experts a table has of each token (Roller et al. 2021).
    `latent`: numbers of the rows that experts read and make, to which and from which a matrix leads, 0 = those of the
    stream. `input_scores`: of the one expert that a row takes, the score, a key of SCORES in `ops.experts`, that
    multiplies what it reads (Llama 4). `beside`: the layers have an MLP, too. `late`: so
    they have, and what experts make is added behind the next layer's (ScMoE, Cai et al. 2024). `idle`: further choices,
    which give back the row itself (Jin et al. 2024, "MoE++").
    """

    routing: Routing
    intermediate: int
    sparse: tuple[bool, ...]
    shared: int = 0
    clamp: Clamp | None = None
    latent: int = 0
    shared_scale: float = 1.0
    input_scores: str = ""
    beside: bool = False
    router_cap: float = 0.0
    late: bool = False
    idle: int = 0
    clamps: tuple[Clamp | None, ...] = ()
    mlp_clamps: tuple[Clamp | None, ...] = ()
    by_token: tuple[bool, ...] = ()

    @property
    def choices(self) -> int:
        """What the router chooses from: experts, and what gives back rows."""
        return self.routing.experts + self.idle

    def clamp_of(self, layer: int) -> Clamp | None:
        """How the activation of the layer's experts is limited."""
        return self.clamps[layer] if self.clamps else self.clamp

    def chosen_by_token(self, layer: int) -> bool:
        """Whether the token of a row says which experts it takes in the layer."""
        return bool(self.by_token) and self.by_token[layer]

    def mlp_clamp_of(self, layer: int) -> Clamp | None:
        """How that of its MLP, or of the expert that every token takes, is."""
        return self.mlp_clamps[layer] if self.mlp_clamps else self.clamp


NO_EXPERTS = MoE(Routing(0, 0), 0, ())
