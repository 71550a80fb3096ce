"""The gated delta rule of a layer, from what the checkpoint holds."""

from __future__ import annotations

from quire.model.load.reader import WeightReader
from quire.model.net.delta import GatedDeltaRule
from quire.model.net.parts import Linear
from quire.ops.arrays import AnyArray, concat, contiguous, exponential
from quire.ops.convolution import Convolution
from quire.ops.recurrent import DeltaSpec


def load_delta_rule(reader: WeightReader, index: int) -> tuple[Linear, GatedDeltaRule]:
    """The matrix of queries, keys and values of layer `index`, packed, and what follows.

    Tensors of torch stay such, so that gradients reach what lies on disk.
    """
    sizes = reader.local.delta
    found = [reader.vector(f"delta_{name}", index) for name in ("conv", "decay", "bias", "scale")]
    taps, decay, bias, scale = (vector for vector in found if vector is not None)
    spec = DeltaSpec(
        sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim, -exponential(decay), contiguous(bias)
    )
    biases = reader.vector("delta_conv", index, "bias")
    conv = Convolution(
        contiguous(_own_channels(reader, taps.reshape(len(taps), -1)).T),
        None if biases is None else _own_channels(reader, biases),
        "silu",
    )
    z, gates = (reader.linear(roles, index) for roles in (("delta_z",), ("delta_b", "delta_a")))
    rule = GatedDeltaRule(conv, spec, z, gates, scale, reader.local.norm_eps)
    return reader.linear(("delta_q", "delta_k", "delta_v"), index), rule


def _own_channels(reader: WeightReader, channels: AnyArray) -> AnyArray:
    """What [channels, ...] of the convolution is of a rank's queries, keys and values."""
    whole, spec = reader.opened.spec.delta, reader.opened.spec
    first, stop = reader.share.role("delta_q", spec)
    rows, before = list[AnyArray](), 0
    for size in (whole.keys, whole.keys, whole.values):
        each = size // whole.key_heads
        rows.append(channels[before + first * each : before + stop * each])
        before += size
    return concat(rows)
