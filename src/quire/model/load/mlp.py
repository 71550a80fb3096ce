"""The MLP of a layer, from what the checkpoint holds."""

from __future__ import annotations

from quire.model.load.reader import Reader
from quire.model.net.linear import Linear
from quire.model.net.parts import FusedGatedMlp, FusedPlainMlp, GatedMlp, Mlp, PlainMlp
from quire.ops.experts import ACTIVATIONS


def load_mlp(reader: Reader, index: int, stack: str = "") -> Mlp:
    """The MLP of layer `index`, without a gate when the checkpoint has none; `stack`: what its roles begin with."""
    gate, up, down = (f"{stack}{role}" for role in ("gate", "up", "down"))
    activation, claim = reader.opened.spec.activation, reader.opened.claim
    if not claim.get(claim.holder(gate, index), index):
        upper, lower = reader.linear((up,), index), reader.linear((down,), index)
        known = activation in ACTIVATIONS
        return (FusedPlainMlp if known and _fused(reader, upper, lower) else PlainMlp)(upper, lower, activation)
    gate_up, lower = reader.linear((gate, up), index), reader.linear((down,), index)
    return (FusedGatedMlp if _fused(reader, gate_up, lower) else GatedMlp)(gate_up, lower, activation)


def _fused(reader: Reader, first: Linear, second: Linear) -> bool:
    """Whether one op takes both: whole matrices of a kind that it has, to which adapters add nothing."""
    plain = reader.adapters is None and not first.more
    return plain and reader.ops.fuses_mlp(first.weight, second.weight)
