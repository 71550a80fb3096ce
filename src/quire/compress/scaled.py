"""AWQ and SmoothQuant over a layer: groups of matrices that read the same, and the factors that move between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from quire.compress.fold import producer, take_out
from quire.compress.layerwise import Change, Key, Made, Seen
from quire.compress.matrices import Matrix
from quire.compress.net import Net
from quire.compress.quantize.awq import awq
from quire.compress.quantize.grid import Grid, Integers
from quire.compress.quantize.rtn import rtn
from quire.compress.quantize.smoothquant import smoothquant
from quire.ops.weights import Weight

OfGroup = Callable[[list[Tensor], Seen, bool], tuple[Tensor, Sequence[Weight]]]
"""(matrices that read the same, what was seen of that, whether factors may be taken) -> (factors [k], new forms)."""


def by_groups(change: OfGroup, wants: tuple[str, ...], sample: bool = False) -> Change:
    """A change of all matrices together that read the same, whose factors are taken out of what makes their inputs.

    The last ones of a layer come first: factors of `down` change rows of `up`, which then is rounded as they are.
    """

    def of(net: Net, layer: int, found: Sequence[Matrix], seen: Mapping[Key, Seen]) -> Made:
        made, tensors = dict[str, Weight](), dict[str, Tensor]()

        def key(matrix: Matrix) -> tuple[int, str, int]:
            return matrix.turn, matrix.observed, -1 if matrix.place.expert is None else matrix.place.expert

        for _, group in groupby(sorted(found, key=key, reverse=True), key=key):
            members = list(group)
            first = members[0]
            role = "" if first.place.expert is not None else producer(net, layer, first.observed, found)
            with first.named():
                own = seen[first.observed, first.place.expert]
                factors, weights = change([m.of(net) for m in members], own, bool(role))
            made |= {m.base: weight for m, weight in zip(members, weights, strict=True)}
            if role:
                tensors |= take_out(net, layer, role, factors)
        return made, tensors

    return Change(of, wants, sample, in_turn=False)


def with_awq(bits: int, group: int, symmetric: bool) -> Change:
    """AWQ: scales where they can be taken out, and clips everywhere.

    Out of values they can only where each of them is read by one column of the output matrix: under grouped-query
    attention that matrix is clipped alone, as AutoAWQ and llm-compressor do.
    """
    grid: Grid = Integers(bits, symmetric)

    def change(matrices: list[Tensor], seen: Seen, free: bool) -> tuple[Tensor, Sequence[Weight]]:
        if not seen.inputs.rows:  # an expert that no row of the text chose
            return torch.ones(matrices[0].shape[1]), [rtn(w, grid, group) for w in matrices]
        found = awq(matrices, seen.sample, grid, group, mean_abs=seen.inputs.mean_abs, scaled=free)
        return found.scales, found.weights

    return by_groups(change, ("mean_abs",), sample=True)


def with_smoothquant(alpha: float) -> Change:
    """SmoothQuant to int8 weights with a scale a row, for int8 activations with one a token."""

    def change(matrices: list[Tensor], seen: Seen, free: bool) -> tuple[Tensor, Sequence[Weight]]:
        if free and seen.inputs.rows:
            return smoothquant(seen.inputs.peak, matrices, alpha)
        plain = [replace(rtn(w, Integers(8), -1), activation_bits=8) for w in matrices]
        return torch.ones(matrices[0].shape[1]), plain

    return by_groups(change, ("peak",))
