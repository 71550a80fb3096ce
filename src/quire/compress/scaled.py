"""AWQ and SmoothQuant over a layer: groups of matrices that read the same, and the factors that move between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from quire.compress.fold import find_producer, unscale_producer
from quire.compress.layerwise import InputKey, LayerModifier, ModifiedLayer, Observations
from quire.compress.matrices import LinearWeight
from quire.compress.net import Net
from quire.compress.quantize.awq import awq
from quire.compress.quantize.grid import Grid, IntegerGrid
from quire.compress.quantize.rtn import rtn
from quire.compress.quantize.smoothquant import smoothquant
from quire.ops.weights import Weight

GroupMethod = Callable[[list[Tensor], Observations, bool], tuple[Tensor, Sequence[Weight]]]
"""(matrices that read the same, what was seen of that, whether factors may be taken) -> (factors [k], new forms)."""


def smoothing_modifier(change: GroupMethod, statistics: tuple[str, ...], sample: bool = False) -> LayerModifier:
    """A change of all matrices together that read the same, whose factors are taken out of what makes their inputs.

    The last ones of a layer come first: factors of `down` change rows of `up`, which then is rounded as they are.
    """

    def of(net: Net, layer: int, found: Sequence[LinearWeight], seen: Mapping[InputKey, Observations]) -> ModifiedLayer:
        made, tensors = dict[str, Weight](), dict[str, Tensor]()

        def key(matrix: LinearWeight) -> tuple[int, str, int]:
            return matrix.position, matrix.input_role, -1 if matrix.place.expert is None else matrix.place.expert

        for _, group in groupby(sorted(found, key=key, reverse=True), key=key):
            members = list(group)
            first = members[0]
            role = "" if first.place.expert is not None else find_producer(net, layer, first.input_role, found)
            with first.error_context():
                own = seen[first.input_role, first.place.expert]
                factors, weights = change([m.read(net) for m in members], own, bool(role))
            made |= {m.base: weight for m, weight in zip(members, weights, strict=True)}
            if role:
                tensors |= unscale_producer(net, layer, role, factors)
        return made, tensors

    return LayerModifier(of, statistics, sample, sequential=False)


def awq_modifier(bits: int, group: int, symmetric: bool) -> LayerModifier:
    """AWQ: scales where they can be taken out, and clips everywhere.

    Out of values they can only where each of them is read by one column of the output matrix: under grouped-query
    attention that matrix is clipped alone, as AutoAWQ and llm-compressor do.
    """
    grid: Grid = IntegerGrid(bits, symmetric)

    def change(matrices: list[Tensor], seen: Observations, free: bool) -> tuple[Tensor, Sequence[Weight]]:
        if not seen.inputs.rows:  # an expert that no row of the text chose
            return torch.ones(matrices[0].shape[1]), [rtn(w, grid, group) for w in matrices]
        found = awq(matrices, seen.sample, grid, group, mean_abs=seen.inputs.mean_abs, scaled=free)
        return found.scales, found.weights

    return smoothing_modifier(change, ("mean_abs",), sample=True)


def smoothquant_modifier(alpha: float) -> LayerModifier:
    """SmoothQuant to int8 weights with a scale a row, for int8 activations with one a token."""

    def change(matrices: list[Tensor], seen: Observations, free: bool) -> tuple[Tensor, Sequence[Weight]]:
        if free and seen.inputs.rows:
            return smoothquant(seen.inputs.peak, matrices, alpha)
        plain = [replace(rtn(w, IntegerGrid(8), -1), activation_bits=8) for w in matrices]
        return torch.ones(matrices[0].shape[1]), plain

    return smoothing_modifier(change, ("peak",))
