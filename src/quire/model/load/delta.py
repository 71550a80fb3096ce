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
    sizes, eps = reader.local.delta, reader.local.norm_eps
    decay, bias, scale = (_vector(reader, name, index) for name in ("decay", "bias", "scale"))
    spec = DeltaSpec(
        sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim, -exponential(decay), contiguous(bias)
    )
    qkv = reader.linear(("delta_q", "delta_k", "delta_v"), index)
    if sizes.low_rank:
        taps = [_vector(reader, f"conv_{name}", index) for name in "qkv"]
        conv = Convolution(contiguous(concat(taps).reshape(-1, sizes.taps).T), None, "silu")
        gates, z, decays = (
            reader.linear(("delta_b",), index),
            _low_rank(reader, "z", index),
            _low_rank(reader, "a", index),
        )
        return qkv, GatedDeltaRule(conv, spec, z, gates, scale, eps, decays, "sigmoid")
    whole, biases = _vector(reader, "conv", index), reader.vector("delta_conv", index, "bias")
    conv = Convolution(
        contiguous(_own_channels(reader, whole.reshape(len(whole), -1)).T),
        None if biases is None else _own_channels(reader, biases),
        "silu",
    )
    straight, gates = (reader.linear(roles, index) for roles in (("delta_z",), ("delta_b", "delta_a")))
    return qkv, GatedDeltaRule(conv, spec, straight, gates, scale, eps)


def _vector(reader: WeightReader, name: str, index: int) -> AnyArray:
    """The vector of `name`, which every such layer has."""
    found: AnyArray | None = reader.vector(f"delta_{name}", index)
    assert found is not None, "the claim has seen it"
    return found


def _low_rank(reader: WeightReader, name: str, index: int) -> LowRank:
    """The two matrices of `name`."""
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
