"""The MLP of a layer, from what the checkpoint holds."""

from __future__ import annotations

from quire.model.load.reader import Reader
from quire.model.net.parts import FusedGatedMlp, GatedMlp, Mlp, PlainMlp


def load_mlp(reader: Reader, index: int, stack: str = "") -> Mlp:
    """The MLP of layer `index`, without a gate when the checkpoint has none; `stack`: what its roles begin with."""
    gate, up, down = (f"{stack}{role}" for role in ("gate", "up", "down"))
    activation, claim = reader.opened.spec.activation, reader.opened.claim
    if not claim.get(claim.holder(gate, index), index):
        return PlainMlp(reader.linear((up,), index), reader.linear((down,), index), activation)
    gate_up, lower = reader.linear((gate, up), index), reader.linear((down,), index)
    plain = reader.adapters is None and not gate_up.more
    fused = plain and reader.ops.fuses_mlp(gate_up.weight, lower.weight)
    return (FusedGatedMlp if fused else GatedMlp)(gate_up, lower, activation)
