"""Round-to-nearest onto any grid, by groups of columns or whole rows, scales by the extremes or by a search."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.compress.quantize.grid import Grid, IntegerGrid, Measure, QuantParams, in_groups, squares
from quire.core.errors import ModelError
from quire.ops.arrays import to_numpy
from quire.ops.weights import CANNOT_ROUND, Weight, as_tensors
from quire.quant.rtn import INT4, INT8

NATIVE_GROUPS = (32, 64, 128)
"""Groups that the native extension rounds, 20 times faster and to the same bits."""


def rtn(w: Tensor, grid: Grid, group: int = 128, measure: Measure = squares) -> Weight:
    """w [n, k] (any float dtype) rounded to the nearest of `grid`, in groups of `group` columns (-1: whole rows).

    Where the grid has several `clips`, each group takes the one of least damage by `measure`. `ModelError` when w holds
    nan or inf.
    """
    groups = in_groups(w.detach(), group)
    width = groups.shape[-1]
    native = {4: INT4, 8: INT8}.get(grid.bits) if isinstance(grid, IntegerGrid) else None
    if native and grid == IntegerGrid(native.bits) and measure is squares and width in NATIVE_GROUPS:
        return _with_positive_scales(as_tensors(native.quantize(to_numpy(w), width).weight))
    if not bool(torch.isfinite(w).all()):
        raise ModelError(CANNOT_ROUND)
    groups = groups.float()
    return round_to(groups, grid, grid.fit(groups, measure))


def _with_positive_scales(weight: Weight) -> Weight:
    """The numbers of `weight`, for activations of 16 bits and with no signs in scales of int8, as others write them."""
    assert weight.scales is not None
    codes, scales = weight.codes, weight.scales
    if weight.kind == "int8":
        signs = torch.where(scales < 0, -1, 1).to(torch.int8)[..., None]
        codes, scales = (codes.view(*scales.shape, -1) * signs).flatten(1), scales.abs()
    return replace(weight, codes=codes, scales=scales, activation_bits=16)


def round_to(groups: Tensor, grid: Grid, qparams: QuantParams) -> Weight:
    """Groups [n, g, group] f32 rounded to the nearest numbers of `grid` at qparams [n, g]."""
    codes, _ = grid.snap(groups, qparams.by_column)
    return grid.weight(codes.flatten(1).to(grid.code_dtype), qparams, groups.shape[-1])
