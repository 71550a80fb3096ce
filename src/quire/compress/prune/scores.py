"""How much a weight or a structure matters: the larger the score, the more is lost when it goes.

All are plain functions of matrices [n, k] (n outputs, k inputs) and of statistics of what flows through them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from quire.core.errors import ConfigError
from quire.ops.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def magnitude(weight: Tensor) -> Tensor:
    """|w| of `weight` [n, k], f32."""
    return weight.float().abs()


def wanda(weight: Tensor, norms: Tensor) -> Tensor:
    """|w| * ||x|| [n, k] f32 (Sun et al. 2024), to be compared within a row; `norms` [k]: L2 norms of the inputs.

    `ConfigError` when there is not one norm per column.
    """
    _expect(norms.shape == weight.shape[1:], f"norms {list(norms.shape)}", f"a matrix {list(weight.shape)}")
    return weight.float().abs() * norms.float()


def taylor(weight: Tensor, gradient: Tensor) -> Tensor:
    """|w * dL/dw| [n, k] f32: how the loss changes, to first order, when one weight goes (LLM-Pruner, Ma et al. 2023).

    `ConfigError` when `gradient` has another shape than `weight`.
    """
    _expect(gradient.shape == weight.shape, f"a gradient {list(gradient.shape)}", f"a matrix {list(weight.shape)}")
    return (weight.float() * gradient.float()).abs()


def activation_gradient(activations: Tensor, gradients: Tensor) -> Tensor:
    """[k] f32: mean over rows of |x * dL/dx|, both [rows, k]: how the loss changes when a channel reads 0.

    Molchanov et al. 2017. `ConfigError` when the shapes differ or there are no rows.
    """
    what = f"activations {list(activations.shape)}"
    _expect(activations.shape == gradients.shape, f"gradients {list(gradients.shape)}", what)
    _expect(len(activations) > 0, what, "a mean over rows")
    return (activations.float() * gradients.float()).abs().mean(0)


def block_influence(before: Tensor, after: Tensor) -> float:
    """1 - mean cosine between a layer's input and output rows, both [rows, hidden] (ShortGPT, Men et al. 2024).

    From 0 (the layer turns no row) to 2. A row of zeros counts as turned by a right angle. `ConfigError` as above.
    """
    _expect(before.shape == after.shape, f"rows {list(after.shape)}", f"rows {list(before.shape)}")
    _expect(len(before) > 0, f"rows {list(before.shape)}", "a mean over rows")
    return 1.0 - float(torch.nn.functional.cosine_similarity(before.double(), after.double(), dim=-1).mean())


def sum_by_unit(scores: Tensor, units: int, axis: int = 0) -> Tensor:
    """[units] f32: sums of `scores` [n, k] over the slices of each unit, which are consecutive along `axis`.

    A head's rows of q (axis 0) or columns of o (axis 1), for example. `ConfigError` when the axis has no whole number
    of numbers per unit.
    """
    count = scores.shape[axis]
    _expect(units > 0 and count % units == 0, f"{units} units", f"an axis of {count}")
    return scores.float().movedim(axis, 0).reshape(units, -1).sum(1)


def sum_coupled(scores: Iterable[Tensor]) -> Tensor:
    """The sum of the scores [units] of matrices whose slices go together: LLM-Pruner's coupled group.

    `ConfigError` when there are none, or they count different units.
    """
    parts = list(scores)
    _expect(len({len(p) for p in parts}) == 1, f"scores of {[len(p) for p in parts]} units", "one group")
    return torch.stack(parts).sum(0)


def _expect(holds: bool, what: str, other: str) -> None:
    if not holds:
        raise ConfigError(f"pruning: {what} do not fit {other}; give those of the same matrix and the same rows")
