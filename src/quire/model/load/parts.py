"""Norms, MLPs and matrices of a layer, and the table of tokens, from what the checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from statistics import NormalDist
from typing import TypeVar

import numpy as np

from quire.core.dtypes import BF16, F32
from quire.core.errors import ConfigError, ModelError
from quire.model.load.placement import Unplaced
from quire.model.load.reader import WeightReader
from quire.model.load.roles import DISK_ROLES, ROLES, Share
from quire.model.net.altup import SparseGate
from quire.model.net.inner_norms import InnerNorm, NormedProduct
from quire.model.net.parts import (
    ClampedMlp,
    FusedGatedMlp,
    FusedPlainMlp,
    GatedMlp,
    LayerNorm,
    Linear,
    Mlp,
    NoNorm,
    Norm,
    NormBeside,
    NormOfSum,
    PlainMlp,
    Product,
    ProjectedNorm,
    ReplacingNorm,
    RmsNorm,
    scaled,
)
from quire.model.net.passing import PassedNorm
from quire.model.net.tensor_parallel import RankInvariantLinear, RankInvariantMlp
from quire.model.net.transformed_norm import SelfGatedNorm, TransformedNorm
from quire.model.net.xielu import XieluMlp
from quire.model.spec import ModelSpec
from quire.ops.arrays import as_f32
from quire.ops.experts import ACTIVATIONS
from quire.ops.weights import PackedTable
from quire.quant.registry import DENSE, matrix_scheme


def load_table(reader: WeightReader) -> Unplaced | PackedTable:
    """The table of tokens: packed where the file has it quantized, or where it is the head with the same bits."""
    claim, tied = reader.opened.claim, not reader.opened.claim.get("head")
    quantized = matrix_scheme(reader.opened.scheme, claim.get("embed")) is not DENSE
    if not reader.ops.reads_packed_tables or not (quantized or (tied and reader.form.target is None)):
        return reader.table("embed")
    return PackedTable(reader.linear(("embed",), None).weight, rounded=reader.form.dtype == BF16)


def load_norm(reader: WeightReader, role: str, layer: int | None = None, scale: float = 1.0) -> Norm:
    """The norm `role`, its output multiplied by `scale`; x itself where the family has none."""
    spec, again = reader.opened.spec, False
    if layer is not None and role == "attn_norm" and spec.join == "twins" and not spec.begins(layer):
        layer, again = layer - 1, True
    of_tokens = role == "embed_norm" and spec.edges.normed
    bare = not DISK_ROLES[role].optional or role == "connector_norm"
    if of_tokens or (spec.norm in ("plain", "unit") and bare):
        same: Unplaced = np.full(DISK_ROLES[role].shape(spec), scale, F32)
        return LayerNorm(same, None, spec.norm_eps) if spec.norm == "plain" else RmsNorm(same, spec.norm_eps)
    weight = reader.vector(role, layer, again=again)
    if weight is None:
        return NoNorm()
    if not spec.norm.startswith("layer"):
        behind = spec.post_norm_eps and role.endswith("post_norm")
        return RmsNorm(weight * scale, spec.post_norm_eps if behind else spec.norm_eps)
    name = reader.opened.claim.get(role, layer).get("bias")
    bias: Unplaced = None if name is None else as_f32(reader.read(name)) * scale
    reader.count("norms", "f32", 0 if bias is None else bias.nbytes)
    return LayerNorm(weight * scale, bias, spec.norm_eps)


def load_block_norms(reader: WeightReader, index: int) -> tuple[Norm, Norm, Norm, Norm]:
    """The norms before and after attention, and before and after the MLP, of layer `index`.

    In a post-LN model the norm
    after an addition is read as the one before what follows, and takes the stream's place there. So do all norms of a
    "normed stream", the first of which is one of the embedded tokens.
    """
    spec = reader.opened.spec
    if spec.join == "normed_stream":
        first: Norm = ReplacingNorm(load_norm(reader, "attn_norm", index)) if index else NoNorm()
        return first, NoNorm(), ReplacingNorm(load_norm(reader, "mlp_norm", index)), NoNorm()
    if spec.join != "post_ln":
        beside = spec.moe.beside and spec.is_sparse(index)  # the norm before the MLP is read with that
        scales = dict.fromkeys(("attn_post_norm", "mlp_post_norm"), spec.factors.post_norm)
        before, after, after_mlp = (
            load_norm(reader, role, index, scales.get(role, 1.0))
            for role in ("attn_norm", "attn_post_norm", "mlp_post_norm")
        )
        mlp = NoNorm() if beside else load_norm(reader, "mlp_norm", index, spec.factors.mlp_in)
        before, mlp = (_gated(reader, role, index, norm) for role, norm in (("attn_norm", before), ("mlp_norm", mlp)))
        return _of_parts(spec, index, before), after, mlp, after_mlp
    before = ReplacingNorm(load_norm(reader, "mlp_post_norm", index - 1)) if index else NoNorm()
    return before, NoNorm(), ReplacingNorm(load_norm(reader, "attn_post_norm", index)), NoNorm()


def _gated(reader: WeightReader, role: str, index: int, norm: Norm) -> Norm:
    """`norm`, the `role` of layer `index`, with its gate where the checkpoint has one."""
    ways = f"{role}_down", f"{role}_up"
    if not reader.opened.claim.get(ways[0], index):
        return norm
    down, up = (reader.dense(way, index) for way in ways)
    return SelfGatedNorm(norm, down, up)


def _of_parts(spec: ModelSpec, index: int, norm: Norm) -> Norm:
    """What the second part of a layer of the files reads: of twins the norm of what the first read; what a shared block
    makes is added for the norm alone, what experts of the first make is added later."""
    if spec.begins(index):
        return norm
    if spec.join == "passing":
        return PassedNorm(norm)
    return NormBeside(norm) if spec.join == "twins" else NormOfSum(norm)


def load_final_norm(reader: WeightReader) -> Norm:
    """The norm of the rows that want logits, and the projection to the head where there is one."""
    spec = reader.opened.spec
    role, layer = ("mlp_post_norm", spec.layers - 1) if spec.join == "post_ln" else ("final_norm", None)
    if spec.edges.activation:
        first, dense = load_norm(reader, role, layer), reader.linear(("head_dense",), None)
        return TransformedNorm(
            first, dense, spec.edges.activation, load_norm(reader, "head_norm", None, spec.logit_scale)
        )
    norm = load_norm(reader, role, layer, scale=spec.logit_scale)
    if not reader.opened.claim.get("project_out"):
        return norm
    return ProjectedNorm(norm, reader.linear(("project_out",), None))


def load_mlp(reader: WeightReader, index: int, stack: str = "") -> Mlp:
    """The MLP of layer `index`, without a gate when the checkpoint has none; `stack`: what its roles begin with."""
    gate, up, down = (f"{stack}{role}" for role in ("gate", "up", "down"))
    activation, claim = reader.opened.spec.activation, reader.opened.claim
    if not claim.get(claim.holder(gate, index), index):
        upper, lower = reader.linear((up,), index), reader.linear((down,), index)
        if activation == "xielu":
            return XieluMlp(upper, lower, *_xielu_numbers(reader, index))
        known = activation in ACTIVATIONS
        return (FusedPlainMlp if known and _fused(reader, upper, lower) else PlainMlp)(upper, lower, activation)
    gate_up, lower = reader.linear((gate, up), index), reader.linear((down,), index)
    inner = None if stack else reader.vector("down_norm", index)
    if inner is not None:
        if reader.form.runs:
            raise ConfigError(
                "--rank-invariant: a norm inside the MLP reads whole rows, whose runs are not kept apart; leave it out",
                param="rank_invariant",
            )
        return GatedMlp(gate_up, NormedProduct(InnerNorm(inner, reader.opened.spec.norm_eps), lower), activation)
    if (clamp := reader.opened.spec.moe.mlp_clamp_of(index)) is not None:
        return ClampedMlp(gate_up, lower, clamp)
    sparsity = reader.opened.spec.streams.sparsity
    if sparsity and sparsity[index]:
        return GatedMlp(SparseGate(gate_up, NormalDist().inv_cdf(sparsity[index])), lower, activation)
    return (FusedGatedMlp if _fused(reader, gate_up, lower) else GatedMlp)(gate_up, lower, activation)


def _xielu_numbers(reader: WeightReader, index: int) -> tuple[float, float, float]:
    """Factors above and below 0, which are softplus of what the file has, the second moved by beta, and beta.

    Between `eps` and 0 transformers takes exp(eps) for exp(x), for gradients; here that is not told apart.
    """
    read = (reader.vector(f"xielu_{name}", index) for name in ("positive", "negative", "beta", "eps"))
    positive, negative, beta, eps = (float(as_f32(one)[0]) for one in read if one is not None)
    if eps < -1e-4:
        raise ModelError(f"{reader.opened.folder}: layer {index}: xIELU's eps is {eps:g}, needs at least -1e-4")
    return float(np.logaddexp(0.0, positive)), beta + float(np.logaddexp(0.0, negative)), beta


def _fused(reader: WeightReader, first: Linear, second: Linear) -> bool:
    """Whether one op takes both: whole matrices of a kind that it has, to which adapters add nothing."""
    plain = reader.adapters is None and not first.more
    return plain and reader.ops.fuses_mlp(first.weight, second.weight)


T = TypeVar("T")
RUNS = 8
"""Runs of each sum, a power of two: so many ranks are the most that give the same bits."""


def load_o(reader: WeightReader, role: str, index: int) -> Product:
    """The last matrix `role` of a mixer, in runs of whole heads or channels where the reader makes any."""
    spec = reader.opened.spec.at(index)
    factor = {"o": spec.factors.attention, "scan_out": spec.factors.scan, "lightning_out": spec.factors.scan}.get(
        role, 1.0
    )

    def load(reader: WeightReader) -> Product:
        return scaled(reader.linear((role,), index), factor)

    inner = reader.vector("o_norm", index) if role == "o" else None
    if inner is not None:
        return NormedProduct(InnerNorm(inner, spec.norm_eps), _in_parts(reader, spec, role, load))
    return _in_parts(reader, spec, role, load)


def _in_parts(reader: WeightReader, spec: ModelSpec, role: str, load: Callable[[WeightReader], Product]) -> Product:
    """What `load` makes of this rank's share, in runs of whole heads or channels where the reader makes any; `spec`
    has the sizes of the layer."""
    if not reader.form.runs:
        return load(reader)
    columns, runs = ROLES[role].shape(spec)[1], gcd(RUNS, ROLES[role].units(spec))
    group = reader.form.group if reader.form.target is not None else 0
    while group and runs > 1 and columns // runs % group:  # a run is whole groups, too
        runs //= 2
    parts = _of_runs(reader, runs, load)
    return RankInvariantLinear(parts, columns // (len(parts) * reader.share.world))


def in_runs(reader: WeightReader, make: Callable[[WeightReader], Mlp], writes: bool = False) -> Mlp:
    """What `make` makes of this rank's share, in runs where the reader makes any; `writes`: it writes to its rows."""
    return RankInvariantMlp(_of_runs(reader, RUNS, make), writes) if reader.form.runs else make(reader)


def _of_runs(reader: WeightReader, runs: int, make: Callable[[WeightReader], T]) -> tuple[T, ...]:
    rank, world = reader.share.rank, reader.share.world
    if runs % world:
        raise ConfigError(
            f"--rank-invariant: a sum of {runs} runs cannot be shared by --tensor-parallel-size {world}; "
            f"use a power of two up to {runs}",
            param="rank_invariant",
        )
    each = runs // world
    shares = [Share(rank * each + i, runs, step=reader.share.step) for i in range(each)]
    return tuple(make(reader.of(share)) for share in shares)
