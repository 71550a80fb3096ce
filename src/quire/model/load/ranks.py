"""A decoder of one rank's share, joined with those of the others."""

from __future__ import annotations

from dataclasses import replace

from quire.model.load.roles import Share
from quire.model.net.decoder import Decoder, Layer
from quire.model.net.encoder import Encoder
from quire.model.net.joined import (
    GatheredHead,
    GatheredNorm,
    SummedAttention,
    SummedEmbedding,
    SummedMlp,
    SummedProduct,
)
from quire.model.net.parts import Embedding, RowNorm, Step
from quire.model.spec import ModelSpec
from quire.ops.backend import Ops
from quire.parallel.comm import Comm
from quire.parallel.place import Place


def share_of(place: Place) -> Share:
    """What a rank at `place` has of each matrix."""
    return Share(place.along("tensor"), place.topology.tensor)


def joined(decoder: Decoder, spec: ModelSpec, place: Place) -> Decoder:
    """`decoder` of a rank's share, joined with those of the others along each axis.

    `spec`: the whole model's.
    """
    comm = place.comm("tensor")
    return decoder if comm is None else _over_shares(decoder, spec, comm)


def joined_encoder(encoder: Encoder, place: Place) -> Encoder:
    """`encoder` of a rank's share, which has the joined decoder's `embed`, joined with those of the others."""
    comm = place.comm("tensor")
    if comm is None:
        return encoder
    layers = tuple(
        replace(layer, o=SummedProduct(layer.o, comm), mlp=SummedMlp(layer.mlp, comm)) for layer in encoder.layers
    )
    return replace(encoder, layers=layers)


def _over_shares(decoder: Decoder, spec: ModelSpec, comm: Comm) -> Decoder:
    """With the sums over ranks that a block needs, and all columns of the logits."""
    assert isinstance(decoder.embed, Embedding), "as it was loaded"
    bounds = [Share(rank, comm.world).role("head", spec) for rank in range(comm.world)]
    widths = tuple(stop - first for first, stop in bounds)
    layers = tuple(_joined(layer, decoder.ops, comm) for layer in decoder.layers)
    embed, head = SummedEmbedding(decoder.embed, comm), GatheredHead(decoder.head, comm, widths)
    return replace(decoder, embed=embed, layers=layers, head=head)


def _joined(layer: Layer, ops: Ops, comm: Comm) -> Layer:
    steps = tuple(_step(step, ops, comm) for step in layer.qkv_steps)
    attention, mlp = SummedAttention(layer.attention, comm), SummedMlp(layer.mlp, comm)
    cross = None if layer.cross is None else replace(layer.cross, o=SummedProduct(layer.cross.o, comm))
    return replace(layer, qkv_steps=steps, attention=attention, mlp=mlp, cross=cross)


def _step(step: Step, ops: Ops, comm: Comm) -> Step:
    """A norm of all heads of a row needs those of all ranks, and its weight of all."""
    if not isinstance(step, RowNorm):
        return step
    widths = (step.span,) * comm.world
    ops.begin_step()
    weight = comm.gather_columns(ops, step.weight[None], widths)[0].clone()
    return GatheredNorm(weight, step.start, widths, step.centered, step.eps, comm)
