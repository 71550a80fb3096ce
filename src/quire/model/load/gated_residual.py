"""Gated residuals of layers and of the head, from what the checkpoint holds."""

from __future__ import annotations

import numpy as np

from quire.core.dtypes import F32
from quire.model.load.gated_ngrams import load_ngrams
from quire.model.load.reader import WeightReader
from quire.model.net.altup import Mixture
from quire.model.net.decoder import Block
from quire.model.net.gated_residual import ReadResidual, Residual, ResidualBlock, StreamGates, StreamNorm
from quire.model.net.parts import Linear, Norm
from quire.ops.arrays import as_f32, to_numpy


def load_residual_block(reader: WeightReader, index: int, norm: Norm) -> Block:
    """What layer `index` has beside its attention and its MLP, before which there are no norms."""
    ngrams = load_ngrams(reader, index) if reader.opened.spec.ngrams.at(index) else None
    return ResidualBlock(_residual(reader, "attn", index), _residual(reader, "mlp", index), ngrams)


def load_read_residual(reader: WeightReader, norm: Norm) -> ReadResidual:
    """What the head reads of the streams."""
    return ReadResidual(_gates(reader, "head", None))


def _gates(reader: WeightReader, part: str, index: int | None) -> StreamGates:
    spec, n = reader.opened.spec, reader.opened.spec.streams.count
    weight = reader.vector(f"residual_{part}_norm", index)
    assert weight is not None, "claimed"
    mean = Mixture(np.zeros((n, spec.streams.gate_rank), F32), np.full(n, 1 / n, F32), 1)
    down, up = (reader.linear((f"residual_{part}_{way}",), index) for way in ("down", "up"))
    return StreamGates(StreamNorm(weight, spec.hidden, spec.norm_eps), down, up, mean)


def _residual(reader: WeightReader, part: str, index: int) -> Residual:
    """Sublayers add 2 sigmoid(W x / n), which is 1 + tanh of W x / (2 n)."""
    role, n = f"residual_{part}_inject", reader.opened.spec.streams.count
    weight = to_numpy(as_f32(reader.read(reader.opened.claim.get(role, index)["weight"])))
    packed = reader.ops.pack_exact(weight / F32.type(2 * n))
    reader.count(role, packed.kind.removesuffix("_f32"), packed.nbytes)
    return Residual(_gates(reader, part, index), Linear(packed), Mixture(np.eye(n, dtype=F32), np.ones(n, F32), n))
