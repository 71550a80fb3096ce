"""A decoder of one rank's share, joined with those of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from quire.core.dtypes import F32
from quire.core.parallel import ParallelConfig
from quire.model.batch import Forward
from quire.model.disk.headers import ModelHeaders
from quire.model.load.roles import ROLES, Share
from quire.model.net.altup import gates_over_ranks
from quire.model.net.audio_encoder import AudioEncoder
from quire.model.net.context_parallel import context_parallel
from quire.model.net.decoder import Attend, Decoder, Layer, MlpAlone
from quire.model.net.encoder import Encoder
from quire.model.net.expert_parallel import ExpertParallel
from quire.model.net.inner_norms import over_ranks
from quire.model.net.layer_ending import InputsOfTokens
from quire.model.net.lightning import LightningAttention
from quire.model.net.moe import BESIDE, MoeMlp, experts_of, with_experts
from quire.model.net.parts import Embedding, Mlp, NoNorm, Normed, ReplacingNorm, RowChange, RowNorm
from quire.model.net.pipeline_parallel import PipelineStage
from quire.model.net.scan import GatedNorm, Scan
from quire.model.net.sequence_parallel import (
    SequenceParallelAttention,
    SequenceParallelLinear,
    SequenceParallelMlp,
    SequenceParallelNorm,
)
from quire.model.net.tensor_parallel import (
    RowParallelLinear,
    TensorParallelAttention,
    TensorParallelGating,
    TensorParallelMlp,
    TensorParallelNorm,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from quire.model.spec import ModelSpec, MoE
from quire.ops.arrays import cast_to
from quire.ops.backend import Ops
from quire.parallel.comm import Comm
from quire.parallel.experts import Division
from quire.parallel.pairs import PairDivider
from quire.parallel.rank_place import RankPlace
from quire.parallel.tree_sum import TreeComm
from quire.quant.base import Quantizer
from quire.quant.registry import DENSE

LARGEST_GROUP = 256
"""Columns of a super-block; the groups that the kernels take are no longer."""


def share_of(place: RankPlace, stages: Sequence[range], step: int = 1) -> Share:
    """What a rank at `place` has of each matrix, and which of the layers, those of all `stages`; `step` as of `Share`.

    The first and the last stage share the head (Yeung et al. 2024): layers could not make up for it, as a prompt needs
    it once and an answer at every token. Ranks that share matrices have the head of the last stage.
    """
    if place.topology.pipeline == 1:
        return Share(place.along("tensor"), place.topology.tensor, place.division, step=step)
    number = place.along("pipeline")
    ends = {0: (0, 2), place.topology.pipeline - 1: (1, 2)} if place.topology.tensor == 1 else {}
    return Share(place.along("tensor"), place.topology.tensor, place.division, stages[number], ends.get(number), step)


def step_of(opened: ModelHeaders, target: Quantizer | None, group: int) -> int:
    """Columns that a scale may be of: those that are asked for, or as many as a file may have."""
    if target is not None:
        return group
    return 1 if opened.scheme is DENSE else LARGEST_GROUP


def parallel_decoder(
    decoder: Decoder, spec: ModelSpec, place: RankPlace, share: Share, options: ParallelConfig
) -> Decoder:
    """`decoder` of a rank's share, joined with those of the others along each axis.

    `spec`: the whole model's. With rows split between the joins its layers are walked all at once.
    """
    if (comm := place.comm("context")) is not None:
        decoder = context_parallel(decoder, comm)
    comm, stages, division = _comm(place, options), place.comm("pipeline"), place.division
    if division is not None and (among := place.comm(division.plan.axis)) is not None:
        decoder = _expert_parallel(decoder, spec.moe, division, among)
    if comm is not None:
        decoder = _tensor_parallel(decoder, spec, comm, options.enable_sequence_parallel, share)
    return decoder if stages is None else _pipeline_stage(decoder, spec, stages, share)


def _comm(place: RankPlace, options: ParallelConfig) -> Comm | None:
    """What joins shares. Two parts make one sum, in whatever order."""
    comm: Comm | None = place.comm("tensor")
    if comm is not None and options.rank_invariant and comm.world > 2:
        comm = TreeComm(comm)
    return comm


def parallel_encoder(
    encoder: Encoder | AudioEncoder | None, place: RankPlace, options: ParallelConfig
) -> Encoder | AudioEncoder | None:
    """`encoder` of a rank's share, if any, which has the joined decoder's `embed`, joined with those of the others."""
    comm = _comm(place, options)
    if encoder is None or comm is None or isinstance(encoder, AudioEncoder):
        return encoder
    layers = tuple(
        replace(layer, o=RowParallelLinear(layer.o, comm), mlp=TensorParallelMlp(layer.mlp, comm))
        for layer in encoder.layers
    )
    return replace(encoder, layers=layers)


def _pipeline_stage(decoder: Decoder, spec: ModelSpec, comm: Comm, share: Share) -> PipelineStage:
    """Add the ways in from the stage before and out to the next.

    In a post-LN model the norm that ends the layer before is what comes in.
    """
    parts = {f.name: getattr(decoder, f.name) for f in fields(decoder)}
    first, *others = decoder.layers
    if comm.rank and isinstance(first.attn_norm, ReplacingNorm):
        parts["embed_changes"] = (Normed(first.attn_norm.norm),)
        parts["layers"] = (replace(first, attn_norm=NoNorm()), *others)
    return PipelineStage(**parts, comm=comm, hidden=spec.hidden, shared=share.head is not None)


def _expert_parallel(decoder: Decoder, moe: MoE, division: Division, comm: Comm) -> Decoder:
    """Divide experts, whose pairs are computed by who holds them."""
    experts = moe.routing.experts
    counted, layers = np.zeros((len(decoder.layers), experts + comm.world + 1), np.int64), list[Layer]()
    for i, layer in enumerate(decoder.layers):
        mlp = layer.mlp
        if (own := experts_of(mlp)) is not None:
            divide = PairDivider(division.held(i, experts), comm.rank, counted[i], moe.idle)
            mlp = with_experts(mlp, replace(own, holders=ExpertParallel(divide, comm, counted)))
        layers.append(replace(layer, mlp=mlp))
    return replace(decoder, layers=tuple(layers))


def counted_pairs(decoder: Forward) -> Any:
    """Counts by layer of what `PairDivider` counts, int64 [layers, experts + ranks + 1], or None where no experts are
    divided."""
    for layer in decoder.layers if isinstance(decoder, Decoder) else ():
        experts = experts_of(layer.mlp)
        if experts is not None and isinstance(experts.holders, ExpertParallel):
            return experts.holders.counted
    return None


def _tensor_parallel(decoder: Decoder, spec: ModelSpec, comm: Comm, scatter: bool, share: Share) -> Decoder:
    """Add the sums over ranks that a block needs, and all columns of the logits."""
    assert isinstance(decoder.embed, Embedding), "as it was loaded"
    bounds = [Share(rank, comm.world).role("head", spec) for rank in range(comm.world)]
    widths = tuple(stop - first for first, stop in bounds)
    normed = [
        _whole_rows(layer, spec.at(i), decoder.ops, comm, share.step)
        for i, layer in zip(share.span(spec), decoder.layers, strict=True)
    ]
    *before, last = normed
    if scatter and before:
        layers = [_sequence_parallel_layer(layer, comm, first=i == 0) for i, layer in enumerate(before)]
        layers.append(
            _tensor_parallel_layer(
                replace(last, attn_norm=SequenceParallelNorm(last.attn_norm, comm, whole=True)), comm
            )
        )
    else:
        layers = [_tensor_parallel_layer(layer, comm) for layer in normed]
    embed, head = VocabParallelEmbedding(decoder.embed, comm), VocabParallelHead(decoder.head, comm, widths)
    inputs = decoder.inputs
    if isinstance(inputs, InputsOfTokens):
        assert isinstance(inputs.embed, Embedding), "as it was loaded"
        inputs = replace(inputs, embed=VocabParallelEmbedding(inputs.embed, comm))
    return replace(decoder, embed=embed, layers=tuple(layers), head=head, inputs=inputs)


def _whole_rows(layer: Layer, spec: ModelSpec, ops: Ops, comm: Comm, step: int) -> Layer:
    """Layer whose norms and cuts are of the rows of all ranks; `spec`: with its sizes."""

    def widths(role: str) -> tuple[int, ...]:
        return _widths(spec, role, comm, step)

    layer = over_ranks(layer, ops, widths, comm)
    return replace(
        layer,
        qkv_changes=_qkv_changes(layer, ops, comm),
        attention=_gathered_scan(layer.attention, spec, ops, comm),
        mlp=gates_over_ranks(layer.mlp, widths, comm),
    )


def _tensor_parallel_layer(layer: Layer, comm: Comm) -> Layer:
    attention, mlp = _joined(layer, TensorParallelAttention, comm), _summed(layer.mlp, comm)
    cross = None if layer.cross is None else replace(layer.cross, o=RowParallelLinear(layer.cross.o, comm))
    return replace(layer, attention=attention, mlp=mlp, cross=cross)


def _joined(layer: Layer, join: Callable[[Attend, Comm], Attend], comm: Comm) -> Attend:
    """The layer's attention with the sum over ranks, which an MLP that stands in its place has itself."""
    return layer.attention if isinstance(layer.attention, MlpAlone) else join(layer.attention, comm)


def _summed(mlp: Mlp, comm: Comm) -> Mlp:
    """Add the sum over ranks, where each has a part of the width. Of experts divided over them only the shared is."""
    if isinstance(mlp, BESIDE):
        return replace(mlp, mlp=TensorParallelMlp(mlp.mlp, comm), experts=_summed(mlp.experts, comm))
    if not isinstance(mlp, MoeMlp) or not isinstance(mlp.holders, ExpertParallel) or mlp.holders.comm is not comm:
        return TensorParallelMlp(mlp, comm)
    return replace(mlp, shared=None if mlp.shared is None else TensorParallelMlp(mlp.shared, comm))


def _sequence_parallel_layer(layer: Layer, comm: Comm, first: bool) -> Layer:
    """Layer with rows split between the joins; the `first` finds the rows of the stream whole, and its norms."""
    cross = layer.cross
    if cross is not None:
        cross = replace(cross, norm=SequenceParallelNorm(cross.norm, comm), o=SequenceParallelLinear(cross.o, comm))
    return replace(
        layer,
        attn_norm=layer.attn_norm if first else SequenceParallelNorm(layer.attn_norm, comm),
        attention=_joined(layer, SequenceParallelAttention, comm),
        cross=cross,
        mlp_norm=SequenceParallelNorm(layer.mlp_norm, comm),
        mlp=_scattered(layer.mlp, comm),
    )


def _scattered(mlp: Mlp, comm: Comm) -> Mlp:
    """Add the sum over ranks of each rank's rows; what is beside experts has norms between, which need sums."""
    if isinstance(mlp, BESIDE):
        return replace(mlp, mlp=SequenceParallelMlp(mlp.mlp, comm), experts=SequenceParallelMlp(mlp.experts, comm))
    return SequenceParallelMlp(mlp, comm)


def _qkv_changes(layer: Layer, ops: Ops, comm: Comm) -> tuple[RowChange, ...]:
    return tuple(_gathered_norm(change, ops, comm) for change in layer.qkv_changes)


def _gathered_scan(attention: Attend, spec: ModelSpec, ops: Ops, comm: Comm) -> Attend:
    """A scan's norm of groups that lie on several ranks needs the channels of all, and its weight of all."""
    if isinstance(attention, LightningAttention):
        inner, groups = spec.heads * spec.head_dim, 1
    else:
        inner, groups = spec.scan.inner, spec.scan.groups
    if not isinstance(attention, Scan | LightningAttention) or groups % comm.world == 0:
        return attention
    norm = attention.norm
    assert isinstance(norm, GatedNorm), "as it was loaded"
    if norm.scale is None:
        return attention
    widths = (inner // comm.world,) * comm.world
    scale = cast_to(comm.gather_columns(ops, norm.scale[None], widths)[0], F32, copy=True)
    whole = replace(norm, scale=scale, span=inner // groups)
    return replace(attention, norm=TensorParallelGating(whole, widths, comm))


def _widths(spec: ModelSpec, role: str, comm: Comm, step: int) -> tuple[int, ...]:
    """Columns of a matrix that is split by columns, by rank."""
    cuts = (
        Share(rank, comm.world, step=step).cut(role, spec, ROLES[role].shape(spec)[1]) for rank in range(comm.world)
    )
    return tuple(cut.stop - cut.start for cut in cuts)


def _gathered_norm(change: RowChange, ops: Ops, comm: Comm) -> RowChange:
    """A norm of all heads of a row needs those of all ranks, and its weight of all."""
    if not isinstance(change, RowNorm):
        return change
    widths = (change.span,) * comm.world
    ops.begin_step()
    weight = cast_to(comm.gather_columns(ops, change.weight[None], widths)[0], F32, copy=True)
    return TensorParallelNorm(weight, change.start, widths, change.centered, change.eps, comm)
