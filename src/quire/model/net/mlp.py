"""The MLP of a layer, from what the checkpoint holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.model.net.parts import FusedGatedMlp, GatedMlp, Mlp, PlainMlp

if TYPE_CHECKING:
    from quire.model.load.loader import Loader


def load_mlp(loader: Loader, index: int, stack: str = "") -> Mlp:
    """The MLP of layer `index`, without a gate when the checkpoint has none; `stack`: what its roles begin with."""
    gate, up, down = (f"{stack}{role}" for role in ("gate", "up", "down"))
    activation, claim = loader.opened.spec.activation, loader.opened.claim
    if not claim.get(claim.holder(gate, index), index):
        return PlainMlp(loader.linear((up,), index), loader.linear((down,), index), activation)
    gate_up, lower = loader.linear((gate, up), index), loader.linear((down,), index)
    plain = loader.adapters is None and not gate_up.more
    fused = plain and loader.ops.fuses_mlp(gate_up.weight, lower.weight)
    return (FusedGatedMlp if fused else GatedMlp)(gate_up, lower, activation)
