"""The encoder, and the decoder's attention over its output, from what the checkpoint holds."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import F32
from quire.model.load.parts import in_runs, load_mlp, load_norm, load_o
from quire.model.load.placement import Unplaced
from quire.model.load.reader import WeightReader
from quire.model.net.decoder import CrossAttention
from quire.model.net.encoder import Encoder, EncoderLayer, KeysValues
from quire.model.net.parts import Embed, Linear
from quire.ops.arrays import AnyArray, contiguous
from quire.ops.attention_spec import AttentionSpec


def bucket_of(distance: NDArray[np.int64], buckets: int, furthest: int) -> NDArray[np.int64]:
    """The bucket of each distance in tokens (int64, >= 0): half are exact, half grow by a factor up to `furthest`.

    In f32 as the models were trained: at a border between buckets other roundings would choose the other one.
    """
    exact = buckets // 2
    growth = np.log(np.maximum(distance, 1).astype(F32) / exact) / math.log(furthest / exact)
    grown = exact + (growth * (buckets - exact)).astype(np.int64)
    return np.where(distance < exact, distance, np.minimum(grown, buckets - 1))


def backward_bias(reader: WeightReader) -> Unplaced | None:
    """The bias [heads, furthest + 1] f32 by distance back, or None when the family has none; where rows see later ones,
    [heads, 2 furthest + 1], those of later keys first."""
    weight, stack = reader.vector("relative_bias"), reader.opened.spec.encoder
    if weight is None:
        return None
    if reader.opened.spec.bidirectional:
        return contiguous(both_ways_bias(weight, stack.furthest)[:, ::-1])
    distances = np.arange(stack.furthest + 1, dtype=np.int64)
    return contiguous(weight[bucket_of(distances, stack.buckets, stack.furthest)].T)


def both_ways_bias(weight: AnyArray, furthest: int) -> Unplaced:
    """The encoder's bias [heads, 2 furthest + 1] f32: half of the buckets [buckets, heads] are for later keys."""
    half = len(weight) // 2
    after = np.arange(-furthest, furthest + 1, dtype=np.int64)
    return contiguous(weight[bucket_of(np.abs(after), half, furthest) + half * (after > 0)].T)


def load_cross(reader: WeightReader, index: int, still: Unplaced) -> CrossAttention:
    """The attention of decoder layer `index` over the encoder's output."""
    spec = reader.opened.spec
    norm, attend = load_norm(reader, "cross_norm", index), AttentionSpec(spec.attention_scale)
    return CrossAttention(norm, reader.linear(("cross_q",), index), still, attend, load_o(reader, "cross_o", index))


def load_encoder_layer(reader: WeightReader, index: int) -> EncoderLayer:
    """Layer `index` of the encoder."""
    qkv = reader.linear(("encoder_q", "encoder_k", "encoder_v"), index)
    o = load_o(reader, "encoder_o", index)
    attn_norm, mlp_norm = (load_norm(reader, f"encoder_{role}", index) for role in ("attn_norm", "mlp_norm"))
    return EncoderLayer(attn_norm, qkv, o, mlp_norm, in_runs(reader, lambda run: load_mlp(run, index, "encoder_")))


def load_encoder(reader: WeightReader, embed: Embed, still: Unplaced) -> Encoder:
    """The encoder, packed and on its device; `embed` is the decoder's too, `still` a rope table, both there."""
    spec = reader.opened.spec
    weight = reader.vector("encoder_relative_bias")
    assert weight is not None, "the claim requires it"
    bias = reader.place(both_ways_bias(weight, spec.encoder.furthest))
    layers = load_layers(reader)
    return Encoder(
        ops=reader.ops,
        embed=embed,
        layers=layers,
        final_norm=reader.place(load_norm(reader, "encoder_final_norm")),
        bias=bias,
        head_dim=spec.head_dim,
        keys_values=load_keys_values(reader, bias.shape[0] * spec.head_dim, still),
    )


def load_layers(reader: WeightReader) -> tuple[EncoderLayer, ...]:
    """The layers of the encoder, there."""
    layers = list[EncoderLayer]()
    for i in range(reader.opened.spec.encoder.layers):
        with reader.part(i):
            layers.append(reader.place(load_encoder_layer(reader, i)))
    return tuple(layers)


def load_keys_values(reader: WeightReader, width: int, still: Unplaced) -> KeysValues:
    """What makes keys and values for each decoder layer, there; `width`: of a row of queries."""
    linears = list[Linear]()
    for i in range(reader.opened.spec.layers):
        with reader.part(i):
            linears.append(reader.place(reader.linear(("cross_k", "cross_v"), i)))
    return KeysValues(tuple(linears), width, still)
