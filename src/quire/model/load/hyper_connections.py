"""Hyper-connections of layers and of the head, from what the checkpoint holds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import F32
from quire.model.load.reader import WeightReader
from quire.model.net.altup import Mixture
from quire.model.net.decoder import Block
from quire.model.net.hyper_connections import (
    ConnectedBlock,
    Connection,
    MeanStreams,
    MixedStreams,
    MixingConnection,
    ReadStreams,
    RepeatedTokens,
    TokenRoutedBlock,
)
from quire.model.net.parts import Linear, Norm, RmsNorm
from quire.ops.arrays import Host, as_f32, to_numpy


def load_connected_block(reader: WeightReader, index: int, norm: Norm) -> Block:
    """What layer `index` has beside its attention, before which is `norm`, and its MLP."""
    spec = reader.opened.spec
    connection = _mixing if spec.streams.rounds else _connection
    kind = TokenRoutedBlock if spec.moe.chosen_by_token(index) else ConnectedBlock
    return kind(connection(reader, "hyper_attn", index), connection(reader, "hyper_mlp", index), norm)


def load_repeated(reader: WeightReader) -> RepeatedTokens:
    """What makes streams of embedded tokens."""
    return RepeatedTokens(reader.opened.spec.streams.count)


def load_read(reader: WeightReader, norm: Norm) -> ReadStreams | MeanStreams:
    """The norm of what the streams come to: their mean where the checkpoint has no gates for the head."""
    if not reader.opened.claim.get("hyper_head", None):
        return MeanStreams(reader.opened.spec.streams.count, norm)
    return ReadStreams(_connection(reader, "hyper_head", None), norm)


def _connection(reader: WeightReader, role: str, index: int | None) -> Connection:
    """Gates of reading, and of sublayers as many of writing: sigmoid(scale * W rms(x) + base), which is half of
    1 + tanh of half of that."""
    spec, n = reader.opened.spec, reader.opened.spec.streams.count
    scale, base = (reader.vector(f"{role}_{part}", index) for part in ("scale", "base"))
    assert scale is not None and base is not None, "claimed"
    weight = to_numpy(as_f32(reader.read(reader.opened.claim.get(role, index)["weight"])))
    packed = reader.ops.pack_exact(np.repeat(to_numpy(scale), n)[:, None] * weight / F32.type(2))
    reader.count(role, packed.kind.removesuffix("_f32"), packed.nbytes)
    gates = len(weight)
    return Connection(
        RmsNorm(np.ones(n * spec.hidden, F32), spec.norm_eps),
        Linear(packed, to_numpy(base) / F32.type(2)),
        Mixture(*_sigmoids(gates, range(n), 1.0, spec.streams.least), 1),
        Mixture(*_sigmoids(gates, range(n, gates), spec.streams.most, spec.streams.least), n) if gates > n else None,
    )


def _mixing(reader: WeightReader, role: str, index: int) -> MixingConnection:
    """Gates of reading, of writing and of mixing, whose logits are scale * W rms(x) + base, each kind with a scale."""
    spec, n = reader.opened.spec, reader.opened.spec.streams.count
    scale, base = (reader.vector(f"{role}_{part}", index) for part in ("scale", "base"))
    assert scale is not None and base is not None, "claimed"
    weight = to_numpy(as_f32(reader.read(reader.opened.claim.get(role, index)["weight"])))
    packed = reader.ops.pack_exact(np.repeat(to_numpy(scale), (n, n, n * n))[:, None] * weight)
    reader.count(role, packed.kind.removesuffix("_f32"), packed.nbytes)
    places = np.arange(n * n).reshape(n, n).T.flatten()  # the matrix has a row for each stream that is read
    mix = _picked(len(weight), 2 * n + places, n)
    return MixingConnection(
        RmsNorm(np.ones(n * spec.hidden, F32), spec.norm_eps),
        Linear(packed, to_numpy(base)),
        _picked(len(weight), np.arange(n), 1),
        _picked(len(weight), np.arange(n, 2 * n), n),
        MixedStreams(mix, spec.streams.rounds, spec.streams.most, spec.streams.least),
    )


def _picked(gates: int, chosen: NDArray[np.int64], out: int) -> Mixture:
    """The mixture by numbers `chosen` of all `gates`, to `out` streams."""
    weight = np.zeros((len(chosen), gates), F32)
    weight[np.arange(len(chosen)), chosen] = 1
    return Mixture(weight, np.zeros(len(chosen), F32), out)


def _sigmoids(gates: int, chosen: range, most: float, least: float) -> tuple[Host, Host]:
    """Weight and bias of a mixture by least + most * sigmoid, of those `chosen` of all `gates`."""
    weight = np.zeros((len(chosen), gates), F32)
    weight[range(len(chosen)), chosen] = most / 2
    return weight, np.full(len(chosen), least + most / 2, F32)
