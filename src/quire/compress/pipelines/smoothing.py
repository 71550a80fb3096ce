"""AWQ and SmoothQuant over a layer: matrices that read the same input, and factors moved into them.

The factors are taken out of what makes the input: of a norm its weight and bias are divided, of a matrix its rows, so
the layer computes the same. A producer that others read too, or that is followed by what does not pass a factor on,
keeps its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from quire.compress.checkpoint.linear_weights import LinearWeight, get_role_matrix, set_role_matrix
from quire.compress.checkpoint.net import Net
from quire.compress.pipelines.layerwise import InputObservations, LayerModifier, ModifiedLayer, Observations
from quire.compress.quantize.awq import awq
from quire.compress.quantize.int8 import smoothquant, unscale_norm, unscale_rows
from quire.compress.quantize.rounding import Grid, IntegerGrid, rtn
from quire.model.mixers.layer_mixers import mixer_of
from quire.ops.weights import Weight

NORMS = {"q": "attn_norm", "conv_write": "attn_norm", "gate": "mlp_norm"}
"""The role that is observed -> the norm whose output it is."""
SEPARATE_NORM_JOINS = ("sequential", "post_norm", "parallel_two_norms")
"""Joins in which a norm is read by attention alone, and another by the MLP alone."""


def find_producer(net: Net, layer: int, input_role: str, found: Sequence[LinearWeight]) -> str:
    """Find the role that makes the inputs of matrices with this `input_role`, where factors may be taken out of it.

    "" where they may not. `found`: the matrices of the layer that are changed, to which a producing matrix must belong.
    """
    spec, claim = net.spec, net.opened.claim
    changed = {m.holder for m in found if m.place.expert is None}
    norm = NORMS.get(input_role, "")
    if norm:
        alone = spec.join in SEPARATE_NORM_JOINS and not (norm == "mlp_norm" and spec.is_sparse(layer))
        return norm if alone and claim.get(norm, layer) else ""
    if input_role == "o":
        plain = (
            spec.heads == spec.kv_heads
            and spec.value_dim == spec.head_dim
            and not spec.clip_qkv
            and mixer_of(spec, layer).own_heads
            and not claim.get("o_norm", layer)
        )
        return "v" if plain and claim.holder("v", layer) in changed else ""
    gated = bool(claim.get(claim.holder("gate", layer), layer))
    gated = gated and not claim.get("down_norm", layer)
    return "up" if input_role == "down" and gated and claim.holder("up", layer) in changed else ""


def unscale_producer(net: Net, layer: int, role: str, factors: Tensor) -> dict[str, Tensor]:
    """Divide the outputs of `role` by `factors` [k] in `net`; returns the vectors that changed, by name on disk."""
    claim, changed = net.opened.claim, dict[str, Tensor]()
    if role not in NORMS.values():
        set_role_matrix(net, role, layer, None, unscale_rows(get_role_matrix(net, role, layer), factors))
        holder = claim.holder(role, layer)
        name, rows = claim.get(holder, layer).get("bias"), net.reader().disk_rows(role, holder, layer)
        if name is not None:
            bias = net.tensors.writable(name)
            at = slice(None) if rows is None else rows
            bias[at] = unscale_rows(bias[at], factors)
            changed[name] = bias
        return changed
    offset = float(net.spec.stored_less_one(role))
    for part, name in claim.get(role, layer).items():
        shift = offset if part == "weight" else 0.0
        with torch.no_grad():
            changed[name] = unscale_norm(net.tensors[name] + shift, factors) - shift
        net.set(name, changed[name])
    return changed


GroupMethod = Callable[[list[Tensor], Observations, bool], tuple[Tensor, Sequence[Weight]]]
"""(matrices that read the same input, observations of it, whether factors may go) -> (factors [k], weights)."""


def smoothing_modifier(change: GroupMethod, statistics: tuple[str, ...], sample: bool = False) -> LayerModifier:
    """Make a modifier of all matrices together that read the same, whose factors are taken out of what makes their
    inputs.

    The last ones of a layer come first: factors of `down` change rows of `up`, which then is rounded as they are.
    """

    def modify(net: Net, layer: int, found: Sequence[LinearWeight], observed: InputObservations) -> ModifiedLayer:
        made, tensors = dict[str, Weight](), dict[str, Tensor]()

        def key(matrix: LinearWeight) -> tuple[int, str, int]:
            return matrix.position, matrix.input_role, -1 if matrix.place.expert is None else matrix.place.expert

        for _, group in groupby(sorted(found, key=key, reverse=True), key=key):
            members = list(group)
            first = members[0]
            role = "" if first.place.expert is not None else find_producer(net, layer, first.input_role, found)
            with first.error_context():
                own = observed[first.input_role, first.place.expert]
                factors, weights = change([m.read(net) for m in members], own, bool(role))
            made |= {m.base: weight for m, weight in zip(members, weights, strict=True)}
            if role:
                tensors |= unscale_producer(net, layer, role, factors)
        return made, tensors

    return LayerModifier(modify, statistics, sample, sequential=False)


def awq_modifier(bits: int, group: int, symmetric: bool) -> LayerModifier:
    """Make the modifier of AWQ: scales where they can be taken out, and clips everywhere.

    Out of values they can only where each of them is read by one column of the output matrix: under grouped-query
    attention that matrix is clipped alone, as AutoAWQ and llm-compressor do.
    """
    grid: Grid = IntegerGrid(bits, symmetric)

    def change(matrices: list[Tensor], observed: Observations, free: bool) -> tuple[Tensor, Sequence[Weight]]:
        if not observed.inputs.rows:  # an expert that no row of the text chose
            return torch.ones(matrices[0].shape[1]), [rtn(w, grid, group) for w in matrices]
        found = awq(matrices, observed.sample, grid, group, mean_abs=observed.inputs.mean_abs, scaled=free)
        return found.scales, found.weights

    return smoothing_modifier(change, ("mean_abs",), sample=True)


def smoothquant_modifier(alpha: float) -> LayerModifier:
    """Make the modifier of SmoothQuant: int8 weights with a scale a row, for int8 activations with one a token."""

    def change(matrices: list[Tensor], observed: Observations, free: bool) -> tuple[Tensor, Sequence[Weight]]:
        if free and observed.inputs.rows:
            return smoothquant(observed.inputs.peak, matrices, alpha)
        plain = [replace(rtn(w, IntegerGrid(8), -1), activation_bits=8) for w in matrices]
        return torch.ones(matrices[0].shape[1]), plain

    return smoothing_modifier(change, ("peak",))
