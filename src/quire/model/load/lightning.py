"""Lightning attention of a layer, from what the checkpoint holds."""

from __future__ import annotations

from quire.model.load.reader import WeightReader
from quire.model.mixers.lightning import EPS, decays
from quire.model.net.lightning import LightningAttention
from quire.model.net.parts import Linear
from quire.model.net.scan import GatedNorm
from quire.ops.recurrent import ScanSpec


def load_lightning(reader: WeightReader, index: int) -> tuple[Linear, LightningAttention]:
    """The matrix of values, keys and queries of layer `index`, packed, and what follows.

    Values are what the scan adds, keys and queries its B and C, of a group for each head.
    """
    spec, whole = reader.local, reader.opened.spec
    first, stop = reader.share.role("lightning_q", whole)
    rates = decays(whole.heads, whole.decay_rates[index])[first:stop]
    scan = ScanSpec(spec.heads, spec.head_dim, spec.head_dim, rates, None, None, spec.heads)
    weight = reader.vector("lightning_norm", index)
    assert weight is not None, "the claim has seen it"
    norm = GatedNorm(weight, spec.heads * spec.head_dim, False, EPS, "sigmoid")
    gate = reader.linear(("lightning_gate",), index)
    qkv = reader.linear(("lightning_v", "lightning_k", "lightning_q"), index)
    return qkv, LightningAttention(scan, whole.activation, gate, norm)
