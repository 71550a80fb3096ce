"""The gated delta rule of a layer, from what the checkpoint holds."""

from __future__ import annotations

from quire.model.load.reader import WeightReader
from quire.model.net.delta import GatedDeltaRule
from quire.model.net.parts import Linear, LowRank
from quire.ops.arrays import AnyArray, concat, contiguous, exponential
from quire.ops.convolution import Convolution
from quire.ops.recurrent import DeltaSpec


def load_delta_rule(reader: WeightReader, index: int) -> tuple[Linear, GatedDeltaRule]:
    """The matrix of queries, keys and values of layer `index`, packed, and what follows.

    Tensors of torch stay such, so that gradients reach what lies on disk.
    """
    sizes, norm_eps = reader.local.delta, reader.local.norm_eps
    decay, bias, scale = (_vector(reader, name, index) for name in ("decay", "bias", "scale"))
    spec = DeltaSpec(
        *(sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim, -exponential(decay), contiguous(bias)),
        lower_bound=sizes.lower_bound,
        beta_scale=sizes.beta_scale,
    )
    qkv = reader.linear(("delta_q", "delta_k", "delta_v"), index)
    taps, biases = _apart(reader, index) if sizes.apart else _together(reader, index)
    z = _product(reader, "z", index)
    gates, decays = reader.linear(("delta_b",) if sizes.by_channel else ("delta_b", "delta_a"), index), None
    if sizes.by_channel:
        decays = _product(reader, "a", index)
    conv = Convolution(contiguous(taps.reshape(-1, sizes.taps).T), biases, "silu")
    return qkv, GatedDeltaRule(conv, spec, z, gates, scale, sizes.eps or norm_eps, decays, sizes.gate)


Taps = tuple[AnyArray, AnyArray | None]
"""What a convolution multiplies the rows of each channel with, and adds."""


def _together(reader: WeightReader, index: int) -> Taps:
    """Channels of the one convolution that a rank has."""
    whole, biases = _vector(reader, "conv", index), reader.vector("delta_conv", index, "bias")
    return _own_channels(reader, whole.reshape(len(whole), -1)), (
        None if biases is None else _own_channels(reader, biases)
    )


def _apart(reader: WeightReader, index: int) -> Taps:
    """The convolutions of queries, keys and values as one."""
    found = [reader.vector(f"delta_conv_{name}", index, "bias") for name in "qkv"]
    biases = [bias for bias in found if bias is not None]
    return concat([_vector(reader, f"conv_{name}", index) for name in "qkv"]), concat(biases) if biases else None


def _vector(reader: WeightReader, name: str, index: int) -> AnyArray:
    """The vector of `name`, which every such layer has."""
    found: AnyArray | None = reader.vector(f"delta_{name}", index)
    assert found is not None, "the claim has seen it"
    return found


def _product(reader: WeightReader, name: str, index: int) -> Linear | LowRank:
    """The matrix of `name`, or the two of them."""
    if not reader.local.delta.low_rank:
        return reader.linear((f"delta_{name}",), index)
    return LowRank(reader.linear((f"delta_{name}_down",), index), reader.linear((f"delta_{name}_up",), index))


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
