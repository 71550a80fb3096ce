"""AWQ (Lin et al. 2024): scaling of columns that matter before they are rounded, and clipping of groups."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.compress.quantize.int8 import scale_columns
from quire.compress.quantize.rounding import Grid, in_groups, output_error_measure, round_to, rtn
from quire.core.errors import ModelError
from quire.ops.weights import CANNOT_ROUND, Weight

EXPONENTS = 20
LEAST = 1e-4
"""Below it a factor counts as it, as in the paper's code: a column that is never active would become 0."""


@dataclass(frozen=True)
class AwqResult:
    """Matrices times `scales` [k] f32 by column, rounded; what makes their input is to be divided by these
    (`int8.unscale_*`).

    `clips`: for each matrix [n, g], the fraction of a group's largest magnitude that its grid reaches, or None. `error`
    and `plain_error`: the mean squared error of outputs on the calibration rows, with these scales and with none,
    before clips are searched.
    """

    scales: Tensor
    weights: tuple[Weight, ...]
    clips: tuple[Tensor | None, ...]
    error: float
    plain_error: float


def awq(
    matrices: Sequence[Tensor],
    x: Tensor,
    grid: Grid,
    group: int = 128,
    *,
    mean_abs: Tensor | None = None,
    unclipped: Collection[int] = (),
    scaled: bool = True,
) -> AwqResult:
    """Search scales and clips of `matrices` [n, k], all that read the same input, on its rows x [T, k].

    Scales are mean|x|^r / mean|w|^(1 - r) for the r of 0, 0.05 .. 0.95 with the least error of the outputs; none at all
    is tried too. `mean_abs` [k] is of more rows than x, where there are any. `unclipped`: indices of matrices whose
    groups keep their range (the paper's code spares queries and keys). `scaled`: else scales are 1, for inputs out of
    which they cannot be taken. `ModelError` when a matrix or x holds nan or inf. Time grows with T.
    """
    ws = [w.detach().float() for w in matrices]
    if not all(bool(torch.isfinite(w).all()) for w in ws):
        raise ModelError(CANNOT_ROUND)
    x = x.detach().float()
    if not bool(torch.isfinite(x).all()):
        raise ModelError("activations on the calibration rows hold nan or inf; the model overflows on them")
    active = x.abs().mean(0) if mean_abs is None else mean_abs.float()
    exponents = EXPONENTS if scaled else 0
    scales, error, plain_error = _search(ws, x, active, grid.with_clips(grid.clips[:1]), group, exponents)
    inputs = x / scales
    weights, clips = [], []
    for at, w in enumerate(ws):
        groups = in_groups(scale_columns(w, scales), group)
        clipped = grid if at in unclipped else grid.with_clips(grid.searched)
        fitted = clipped.fit(groups, output_error_measure(inputs, groups.shape[-1]))
        weights.append(round_to(groups, grid, fitted))
        clips.append(fitted.clip)
    return AwqResult(scales, tuple(weights), tuple(clips), error, plain_error)


def _search(
    ws: list[Tensor], x: Tensor, active: Tensor, grid: Grid, group: int, exponents: int
) -> tuple[Tensor, float, float]:
    """Search the scales; returns (scales [k], their error, the error without)."""
    large = _importance(ws, group)
    best = torch.ones_like(active)
    least = plain = _error(ws, x, best, grid, group)
    for step in range(exponents):
        ratio = step / exponents
        scales = (active.pow(ratio) / (large.pow(1 - ratio) + LEAST)).clamp(min=LEAST)
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = _error(ws, x, scales, grid, group)
        if error < least:
            best, least = scales, error
    return best, least, plain


def _importance(ws: list[Tensor], group: int) -> Tensor:
    """Mean over rows [k] of magnitudes, each relative to the largest of its group."""
    total = torch.zeros(ws[0].shape[1])
    for w in ws:
        groups = in_groups(w.abs(), group)
        total += (groups / (groups.amax(-1, keepdim=True) + 1e-6)).flatten(1).sum(0)
    return total / sum(len(w) for w in ws)


def _error(ws: list[Tensor], x: Tensor, scales: Tensor, grid: Grid, group: int) -> float:
    """Mean squared error of outputs when matrices times scales are rounded."""
    total, turned = 0.0, (x / scales).t().contiguous()
    for w in ws:
        larger = w * scales
        off = rtn(larger, grid, group).dequantize() - larger
        total += float((off @ turned).square_().mean()) * len(w)
    return total / sum(len(w) for w in ws)
