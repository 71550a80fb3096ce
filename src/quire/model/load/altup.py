"""Layers of several streams, and what makes and joins the streams, from what the checkpoint holds."""

from __future__ import annotations

import numpy as np

from quire.core.dtypes import F32
from quire.model.load.parts import load_norm
from quire.model.load.reader import WeightReader
from quire.model.net.altup import (
    AltUp,
    InputsOfStream,
    JoinedStreams,
    Laurel,
    Mixture,
    StreamInputs,
    StreamsBlock,
    StreamsOfTokens,
)
from quire.model.net.decoder import Inputs
from quire.model.net.parts import Norm, RmsNorm
from quire.ops.arrays import Host, as_f32, to_numpy


def load_streams_block(reader: WeightReader, index: int, norm: Norm) -> StreamsBlock:
    """What layer `index` has beside its attention, before which is `norm`, and its MLP."""
    left, right, gate, project = (
        reader.linear((role,), index) for role in ("laurel_left", "laurel_right", "input_gate", "input_project")
    )
    laurel = Laurel(left, right, load_norm(reader, "laurel_norm", index))
    inputs = StreamInputs(index, gate, project, load_norm(reader, "input_norm", index), reader.opened.spec.activation)
    return StreamsBlock(_altup(reader, index), norm, laurel, inputs)


def _altup(reader: WeightReader, index: int) -> AltUp:
    spec = reader.opened.spec
    n, scale = spec.streams.count, reader.vector("stream_norm", index)
    factors = reader.vector("stream_factors", index)
    assert scale is not None and factors is not None, "claimed"
    predict, correct = (_small(reader, role, index) for role in ("stream_predict", "stream_correct"))
    ones = np.zeros((n, n + 1), F32)
    ones[:, :n] = np.eye(n)
    ones[:, 0] -= 1
    ones[:, n] += 1
    weight = np.zeros((n, n + 1, n), F32)
    weight[:, 0], weight[:, n] = -correct, correct
    spread = np.ones(n, F32)
    spread[0] = 0
    return AltUp(
        spec.hidden,
        RmsNorm(to_numpy(scale) / np.float32(spec.hidden), spec.norm_eps),
        reader.dense("stream_router", index),
        Mixture(predict, np.eye(n, dtype=F32).reshape(-1), n),
        Mixture(weight.reshape(-1, n), ones.reshape(-1), n),
        Mixture(np.zeros((n, n), F32), spread, n),
        factors,
    )


def _small(reader: WeightReader, role: str, index: int) -> Host:
    """A matrix of a few numbers, f32."""
    found = to_numpy(as_f32(reader.read(reader.opened.claim.get(role, index)["weight"])))
    reader.count(role, "f32", found.nbytes)
    return found.copy()


def load_spread(reader: WeightReader) -> StreamsOfTokens:
    """What makes streams of embedded tokens."""
    count = reader.opened.spec.streams.count
    parts = tuple(reader.linear((f"enter_stream_{i}",), None) for i in range(1, count))
    return StreamsOfTokens(parts, count)


def load_joined(reader: WeightReader, norm: Norm) -> JoinedStreams:
    """The norm of what the streams come to."""
    count = reader.opened.spec.streams.count
    return JoinedStreams(tuple(reader.linear((f"leave_stream_{i}",), None) for i in range(1, count)), norm)


def of_first(reader: WeightReader, inputs: Inputs) -> Inputs:
    """What layers are given, of the first stream."""
    spec = reader.opened.spec
    return InputsOfStream(inputs, spec.hidden) if spec.streams.count else inputs
