"""A decoder of one rank's share, joined with those of the others."""

from __future__ import annotations

from dataclasses import replace

from quire.core.errors import ConfigError
from quire.model.load.roles import Share
from quire.model.net.decoder import Decoder, Layer
from quire.model.net.joined import GatheredHead, SummedAttention, SummedMlp
from quire.model.net.parts import NormSpans
from quire.model.spec import ModelSpec
from quire.parallel.comm import Comm


def joined(decoder: Decoder, spec: ModelSpec, comm: Comm) -> Decoder:
    """`decoder` of a share with the sums over ranks that a block needs, and all columns of the logits.

    `spec`: the whole model's. `ConfigError` for what cannot be split yet, with the reason.
    """
    if spec.encoder.layers:
        raise ConfigError(
            "--tensor-parallel-size: an encoder is computed by one rank only; leave it out",
            param="tensor_parallel_size",
        )
    bounds = [Share(rank, comm.world).role("head", spec) for rank in range(comm.world)]
    widths = tuple(stop - first for first, stop in bounds)
    layers = tuple(_joined(layer, spec, comm) for layer in decoder.layers)
    return replace(decoder, layers=layers, head=GatheredHead(decoder.head, comm, widths))


def _joined(layer: Layer, spec: ModelSpec, comm: Comm) -> Layer:
    whole = any(isinstance(step, NormSpans) and step.span != spec.head_dim for step in layer.qkv_steps)
    if whole:
        raise ConfigError(
            f"--tensor-parallel-size: {spec.family} norms queries and keys of all heads together, which is not split "
            "over ranks yet",
            param="tensor_parallel_size",
        )
    return replace(layer, attention=SummedAttention(layer.attention, comm), mlp=SummedMlp(layer.mlp, comm))
