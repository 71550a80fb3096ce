"""GPTQ (Frantar et al. 2022): rounding of columns one after the other; those that follow make up for the error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.compress.calibration.statistics import InputStatistics
from quire.compress.quantize.rounding import Grid, QuantParams, in_groups
from quire.core.errors import ModelError
from quire.ops.weights import CANNOT_ROUND, Weight

BLOCK = 128
"""Columns whose errors reach the columns behind them in one product (the paper's lazy batches)."""
INNER_BLOCK = 16
"""Columns whose errors reach the next ones one by one, which is bound by memory: 512 columns of 8192 rows take 0.46 s
on a core, with 8 or 32 of them 0.5 s or more, and 0.55 s with a whole batch."""

PRUNED = 0.1
"""The share of zeros from which they are no chance."""


def gptq(
    w: Tensor,
    hessian: Tensor,
    grid: Grid,
    group: int = 128,
    *,
    act_order: bool = False,
    static_groups: bool = False,
    damping: float = 0.01,
    qparams: QuantParams | None = None,
) -> Weight:
    """Round w [n, k] to `grid` in groups of `group` columns (-1: whole rows) such that w x hardly changes.

    `hessian` [k, k] f32 or f64 as `InputStatistics` gives it; the work is done in its dtype. `damping`: what is added
    to its diagonal, as a fraction of the diagonal's mean. `act_order`: columns in the order of falling activation;
    groups are then of columns in this order, which the weight's `order` tells, unless `static_groups` finds the qparams
    of groups of neighbours beforehand. `qparams` [n, k / group] are static ones that the caller found. Columns that are
    never active become 0. Where a tenth of w is 0 it was pruned, and these stay 0. `ModelError` when w or the Hessian
    cannot be worked with.
    """
    if hessian.shape != (w.shape[1], w.shape[1]):
        raise ValueError(f"the Hessian is {list(hessian.shape)}, the matrix has {w.shape[1]} columns")
    return _round_matrix(w, FactoredHessian.of(hessian, damping, act_order), grid, group, static_groups, qparams)


def gptq_all(
    ws: Iterable[Tensor],
    inputs: InputStatistics,
    grid: Grid,
    group: int = 128,
    *,
    act_order: bool = False,
    static_groups: bool = False,
    damping: float = 0.01,
) -> Iterator[Weight]:
    """Round matrices [n, k] that read the same `inputs` by `gptq`, one after the other.

    Their Hessian is used up and factored once: at most two matrices of its size are in memory.
    """
    factored: FactoredHessian | None = None
    for w in ws:
        factored = FactoredHessian.of(inputs.take_hessian(), damping, act_order) if factored is None else factored
        yield _round_matrix(w, factored, grid, group, static_groups)


@dataclass(frozen=True)
class FactoredHessian:
    """A Hessian as GPTQ wants it, with its columns in the order `order`: V diag(d)^2 V^T.

    `factor` [k, k]: V, an upper triangle with ones on its diagonal. The errors e_j = w_j - q_j of the columns before
    column i shift what is best there to w_i + sum V_ji e_j, so nothing is inverted: GPTQ is Babai's nearest plane
    (Chen et al. 2025). `order` int64 [k], None: as they are. `dead` bool [k]: columns that are never active.
    """

    factor: Tensor
    dead: Tensor
    order: Tensor | None

    @staticmethod
    def of(hessian: Tensor, damping: float, act_order: bool) -> FactoredHessian:
        """Factor `hessian` [k, k]. `ModelError` where it is not positive definite with its damping."""
        diagonal = hessian.diagonal()
        dead = diagonal == 0
        order = diagonal.argsort(descending=True, stable=True) if act_order else None
        places = (torch.arange(len(dead)) if order is None else order).flip(0)
        damped = hessian[places[:, None], places]
        del hessian, diagonal  # its memory is needed again, where nobody else holds it
        turned = damped.diagonal()
        turned[dead[places]] = 1
        turned += damping * turned.mean()
        del turned
        lower, failed = torch.linalg.cholesky_ex(damped)
        del damped
        if int(failed) or not bool(torch.isfinite(lower.diagonal()).all()):
            raise ModelError("the Hessian of the calibration rows is not positive definite; raise damping or add rows")
        upper = lower.flip(0, 1).contiguous()
        del lower
        return FactoredHessian(upper.div_(upper.diagonal().clone()), dead, order)


def _round_matrix(
    w: Tensor,
    factored: FactoredHessian,
    grid: Grid,
    group: int,
    static_groups: bool,
    qparams: QuantParams | None = None,
) -> Weight:
    """Round one matrix."""
    if not bool(torch.isfinite(w).all()):
        raise ModelError(CANNOT_ROUND)
    k, order = w.shape[1], factored.order
    columns = w.detach().to(factored.factor.dtype).t().contiguous()
    columns[factored.dead] = 0
    width = in_groups(w, group).shape[-1]
    if qparams is None and (static_groups or width == k):
        qparams = grid.fit(in_groups(columns.t().contiguous(), width))
    by_group: list[QuantParams | None] = [None] * (k // width)
    group_of = torch.arange(k) // width
    if qparams is not None:
        turned = QuantParams.of(lambda t: t.to(columns.dtype).t().contiguous(), qparams)
        by_group = [QuantParams.of(lambda t, g=g: t[g], turned) for g in range(k // width)]
        group_of = group_of if order is None else order // width
    columns = columns if order is None else columns[order]
    gone = columns == 0
    pruned = gone if int(gone.sum()) >= PRUNED * w.numel() else None
    codes, found = _round_columns(columns, factored.factor, grid, group_of.tolist(), by_group, pruned)
    if order is not None and qparams is not None:
        codes, order = codes[order.argsort()], None
    return grid.weight(codes.t().contiguous(), found, width, None if order is None else order.int())


def _runs(start: int, stop: int, width: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of up to `size` columns from `start`, where a group of `width` begins or goes on, to `stop`.

    A range begins with a group or lies within one: when a group's qparams are found, all its columns must have what
    came before them.
    """
    step = size // width * width or size
    while start < stop:
        end = start + step if width <= size else min(start + step, start + width - start % width)
        yield start, min(end, stop)
        start = end


def _round_columns(
    columns: Tensor,
    factor: Tensor,
    grid: Grid,
    group_of: list[int],
    by_group: list[QuantParams | None],
    pruned: Tensor | None,
) -> tuple[Tensor, QuantParams]:
    """Round `columns` [k, n]; returns codes [k, n] and qparams [n, g].

    Column i has the qparams of group `group_of[i]`, which are found when its first column is reached if there are none.
    `pruned` [k, n]: numbers that become 0 whatever the errors of others would have them be.
    """
    k, n = columns.shape
    width, known = k // len(by_group), list(by_group)
    codes, best = torch.empty((k, n), dtype=grid.code_dtype), columns.clone()
    for start, stop in _runs(0, k, width, BLOCK):
        errors = torch.empty((stop - start, n), dtype=columns.dtype)
        for first, last in _runs(start, stop, width, INNER_BLOCK):
            for i in range(first, last):
                qparams = known[group_of[i]]
                if qparams is None:
                    fitted = grid.fit(_free(columns, best, factor, slice(i, i + width)).t().contiguous()[:, None])
                    known[group_of[i]] = qparams = QuantParams.of(lambda t: t[:, 0], fitted)
                codes[i], number = grid.snap(best[i] if pruned is None else best[i].masked_fill(pruned[i], 0), qparams)
                error = torch.sub(columns[i], number, out=errors[i - start])
                best[i + 1 : last].addr_(factor[i, i + 1 : last], error)
            best[last:stop].addmm_(factor[first:last, last:stop].t(), errors[first - start : last - start])
        best[stop:].addmm_(factor[start:stop, stop:].t(), errors)
    return codes, QuantParams.of(lambda *tensors: torch.stack(tensors, 1), *(s for s in known if s is not None))


def _free(columns: Tensor, best: Tensor, factor: Tensor, group: slice) -> Tensor:
    """Return what is best for the columns `group` [width, n] together, none of which is rounded yet.

    `best` of one counts on those before it, which would have no errors after their own shifts.
    """
    shift = best[group] - columns[group]
    before: Tensor = torch.linalg.solve_triangular(factor[group, group].t(), shift, upper=False, unitriangular=True)
    return columns[group] + before
