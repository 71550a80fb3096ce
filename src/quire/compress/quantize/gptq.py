"""GPTQ (Frantar et al. 2023): columns are rounded one after the other, and those that follow make up for the error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.compress.quantize.grid import Grid, Steps, in_groups
from quire.compress.stats import Inputs
from quire.core.errors import ModelError
from quire.ops.weights import CANNOT_ROUND, Weight

BLOCK = 128
"""Columns whose errors reach the columns behind them in one product (the paper's lazy batches)."""
FEW = 16
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
    steps: Steps | None = None,
) -> Weight:
    """w [n, k] rounded to `grid` in groups of `group` columns (-1: whole rows) such that w x hardly changes.

    `hessian` [k, k] f32 or f64 as `Inputs` gives it; the work is done in its dtype. `damping`: what is added to its
    diagonal, as a fraction of the diagonal's mean. `act_order`: columns in the order of falling activation; groups are
    then of columns in this order, which the weight's `order` tells, unless `static_groups` finds the steps of groups of
    neighbours beforehand. `steps` [n, k / group] are static ones that the caller found. Columns that are never active
    become 0. Where a tenth of w is 0 it was pruned, and these stay 0. `ModelError` when w or the Hessian cannot be
    worked with.
    """
    if hessian.shape != (w.shape[1], w.shape[1]):
        raise ValueError(f"the Hessian is {list(hessian.shape)}, the matrix has {w.shape[1]} columns")
    return _rounded(w, Factored.of(hessian, damping, act_order), grid, group, static_groups, steps)


def gptq_all(
    ws: Iterable[Tensor],
    inputs: Inputs,
    grid: Grid,
    group: int = 128,
    *,
    act_order: bool = False,
    static_groups: bool = False,
    damping: float = 0.01,
) -> Iterator[Weight]:
    """`gptq` of matrices [n, k] that read the same `inputs`, one after the other.

    Their Hessian is used up and factored once: at most two matrices of its size are in memory.
    """
    factored: Factored | None = None
    for w in ws:
        factored = Factored.of(inputs.take_hessian(), damping, act_order) if factored is None else factored
        yield _rounded(w, factored, grid, group, static_groups)


@dataclass(frozen=True)
class Factored:
    """A Hessian as GPTQ wants it, with its columns in the order `order`: V diag(d)^2 V^T.

    `factor` [k, k]: V, an upper triangle with ones on its diagonal. The errors e_j = w_j - q_j of the columns before
    column i shift what is best there to w_i + sum V_ji e_j, so nothing is inverted: GPTQ is Babai's nearest plane
    (Chen et al. 2025). `order` int64 [k], None: as they are. `dead` bool [k]: columns that are never active.
    """

    factor: Tensor
    dead: Tensor
    order: Tensor | None

    @staticmethod
    def of(hessian: Tensor, damping: float, act_order: bool) -> Factored:
        """The same of `hessian` [k, k]. `ModelError` where it is not positive definite with its damping."""
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
        return Factored(upper.div_(upper.diagonal().clone()), dead, order)


def _rounded(
    w: Tensor, factored: Factored, grid: Grid, group: int, static_groups: bool, steps: Steps | None = None
) -> Weight:
    """One matrix."""
    if not bool(torch.isfinite(w).all()):
        raise ModelError(CANNOT_ROUND)
    k, order = w.shape[1], factored.order
    columns = w.detach().to(factored.factor.dtype).t().contiguous()
    columns[factored.dead] = 0
    width = in_groups(w, group).shape[-1]
    if steps is None and (static_groups or width == k):
        steps = grid.fit(in_groups(columns.t().contiguous(), width))
    by_group: list[Steps | None] = [None] * (k // width)
    group_of = torch.arange(k) // width
    if steps is not None:
        turned = Steps.of(lambda t: t.to(columns.dtype).t().contiguous(), steps)
        by_group = [Steps.of(lambda t, g=g: t[g], turned) for g in range(k // width)]
        group_of = group_of if order is None else order // width
    columns = columns if order is None else columns[order]
    gone = columns == 0
    pruned = gone if int(gone.sum()) >= PRUNED * w.numel() else None
    codes, found = _sweep(columns, factored.factor, grid, group_of.tolist(), by_group, pruned)
    if order is not None and steps is not None:
        codes, order = codes[order.argsort()], None
    return grid.weight(codes.t().contiguous(), found, width, None if order is None else order.int())


def _runs(start: int, stop: int, width: int, size: int) -> Iterator[tuple[int, int]]:
    """Ranges of up to `size` columns from `start`, where a group of `width` begins or goes on, to `stop`.

    A range begins with a group or lies within one: when a group's steps are found, all its columns must have what came
    before them.
    """
    step = size // width * width or size
    while start < stop:
        end = start + step if width <= size else min(start + step, start + width - start % width)
        yield start, min(end, stop)
        start = end


def _sweep(
    columns: Tensor,
    factor: Tensor,
    grid: Grid,
    group_of: list[int],
    by_group: list[Steps | None],
    pruned: Tensor | None,
) -> tuple[Tensor, Steps]:
    """Codes [k, n] and steps [n, g] of `columns` [k, n].

    Column i has the steps of group `group_of[i]`, which are found when its first column is reached if there are none.
    `pruned` [k, n]: numbers that become 0 whatever the errors of others would have them be.
    """
    k, n = columns.shape
    width, known = k // len(by_group), list(by_group)
    codes, best = torch.empty((k, n), dtype=grid.code_dtype), columns.clone()
    for start, stop in _runs(0, k, width, BLOCK):
        errors = torch.empty((stop - start, n), dtype=columns.dtype)
        for first, last in _runs(start, stop, width, FEW):
            for i in range(first, last):
                steps = known[group_of[i]]
                if steps is None:
                    fitted = grid.fit(_free(columns, best, factor, slice(i, i + width)).t().contiguous()[:, None])
                    known[group_of[i]] = steps = Steps.of(lambda t: t[:, 0], fitted)
                codes[i], number = grid.snap(best[i] if pruned is None else best[i].masked_fill(pruned[i], 0), steps)
                error = torch.sub(columns[i], number, out=errors[i - start])
                best[i + 1 : last].addr_(factor[i, i + 1 : last], error)
            best[last:stop].addmm_(factor[first:last, last:stop].t(), errors[first - start : last - start])
        best[stop:].addmm_(factor[start:stop, stop:].t(), errors)
    return codes, Steps.of(lambda *tensors: torch.stack(tensors, 1), *(s for s in known if s is not None))


def _free(columns: Tensor, best: Tensor, factor: Tensor, group: slice) -> Tensor:
    """What is best for the columns `group` [width, n] together, none of which is rounded yet: `best` of one counts on
    those before it, which would have no errors after their own shifts."""
    shift = best[group] - columns[group]
    before: Tensor = torch.linalg.solve_triangular(factor[group, group].t(), shift, upper=False, unitriangular=True)
    return columns[group] + before
