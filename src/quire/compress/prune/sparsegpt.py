"""SparseGPT (Frantar and Alistarh 2023): pruning of one column after another, where those behind make up for it.

What is minimized is the squared error of W x over the calibration rows, whose second moments are `hessian`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from quire.compress.prune.masks import Pattern, ratio_mask
from quire.core.errors import ConfigError, ModelError
from quire.ops.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Quantize = Callable[["Tensor", int], "Tensor"]
"""(values [n] f32, column) -> the nearest values of the column's grid [n]."""


def sparsegpt(
    weight: Tensor,
    hessian: Tensor,
    target: float | Pattern,
    *,
    damping: float = 0.01,
    block: int = 128,
    quantize: Quantize | None = None,
) -> tuple[Tensor, Tensor]:
    """Prune `weight` [n, k]; returns (pruned [n, k] f32, mask [n, k] bool, True = stays).

    `hessian` [k, k]: sums of x x^T over rows of inputs, in any scale; `damping`: share of its mean diagonal that is
    added to it. `target`: the share of zeros, chosen within each `block` of columns over all rows, or N:M of each row.
    `quantize`: kept weights are rounded to it on the way, and what that costs is made up for as well. Columns that no
    row used become 0.

    `ConfigError` for shapes and options that do not fit, `ModelError` when `hessian` has no inverse or NaN is there.
    """
    _check(weight, hessian, target, damping, block)
    step = _whole_groups(block, target)
    work, upper = weight.float().clone(), _factor(hessian, damping, weight)
    unused = hessian.diagonal() == 0
    work[:, unused] = 0
    mask = torch.empty(weight.shape, dtype=torch.bool, device=weight.device)
    for first in range(0, weight.shape[1], step):
        last = min(first + step, weight.shape[1])
        part, errors = work[:, first:last], torch.empty_like(work[:, first:last])
        own, kept = upper[first:last, first:last], mask[:, first:last]
        if not isinstance(target, Pattern):
            kept.copy_(ratio_mask(_saliency(part, own), target, per_row=False))
        for i in range(last - first):
            if isinstance(target, Pattern) and i % target.of == 0:
                group = slice(i, i + target.of)
                kept[:, group] = target.mask(_saliency(part[:, group], own[group, group]))
            rounded = part[:, i] if quantize is None else quantize(part[:, i], first + i)
            new = rounded.masked_fill(~kept[:, i], 0)
            errors[:, i] = (part[:, i] - new) / own[i, i]
            part[:, i + 1 :] -= errors[:, i, None] * own[i, i + 1 :]
            part[:, i] = new
        work[:, last:] -= errors @ upper[first:last, last:]
    return work, mask & ~unused


def _saliency(weight: Tensor, upper: Tensor) -> Tensor:
    """The error that each weight's going adds: w^2 / [inverse of the Hessian of the columns from it on]_00."""
    return (weight / upper.diagonal()) ** 2


def _factor(hessian: Tensor, damping: float, weight: Tensor) -> Tensor:
    """U with U^T U the inverse of the damped Hessian: its row i serves column i once those before are done."""
    damped = hessian.to(weight.device, torch.float32, copy=True)
    diagonal = damped.diagonal()
    added = damping * diagonal.mean()
    diagonal[diagonal == 0] = 1.0
    diagonal += added
    inverse = torch.cholesky_inverse(_cholesky(damped, damping))
    return _cholesky(inverse, damping).T


def _cholesky(matrix: Tensor, damping: float) -> Tensor:
    lower, failed = torch.linalg.cholesky_ex(matrix)
    if failed:
        raise ModelError(
            f"SparseGPT: the inputs' second moments have no inverse with damping {damping:g}; raise the damping, or "
            "calibrate on more rows"
        )
    return cast("Tensor", lower)


def _whole_groups(block: int, target: float | Pattern) -> int:
    return block if not isinstance(target, Pattern) else -(-block // target.of) * target.of


def _check(weight: Tensor, hessian: Tensor, target: float | Pattern, damping: float, block: int) -> None:
    k = weight.shape[1]
    if hessian.shape != (k, k):
        raise ConfigError(f"SparseGPT: a hessian {list(hessian.shape)} does not fit a matrix {list(weight.shape)}")
    if not 0 <= damping <= 1 or block < 1:
        raise ConfigError(
            f"SparseGPT: damping {damping:g} needs to be from 0 to 1, block {block} at least 1", param="damping"
        )
    for what, tensor, source in (("matrix", weight, "source model"), ("hessian", hessian, "calibration rows")):
        if not tensor.isfinite().all():
            raise ModelError(f"SparseGPT: the {what} holds NaN or infinity; check the {source}")
    if isinstance(target, Pattern):
        target.groups(k)
