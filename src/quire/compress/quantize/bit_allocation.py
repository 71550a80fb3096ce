"""Allocation of formats to matrices, so that all fit a number of bytes and the damage is least."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import ConfigError

Formats = Mapping[str, tuple[int, float]]
"""Format -> (bytes of the matrix in it, damage: any number that adds up, such as a KL divergence)."""
MAX_STATES = 1 << 18
"""Sums kept at once. The 224 matrices of a model of 32 layers in four formats took at most 5019, all of other sizes."""


@dataclass(frozen=True)
class _PartialSums:
    """The sums that are left once a matrix was chosen for: what they came from and which format it took."""

    sizes: NDArray[np.int64]
    damages: NDArray[np.float64]
    parents: NDArray[np.int64]
    choices: NDArray[np.int64]


def choose_formats(options: Mapping[str, Formats], budget: int) -> dict[str, str]:
    """Choose a format for each matrix of `options` with the least total damage, among those of at most `budget` bytes
    in all.

    Exact: dynamic programming over sums that are not beaten in both size and damage, less those that a Lagrangian bound
    shows to lead nowhere (multiple-choice knapsack; Sinha and Zoltners 1979). `ConfigError` when nothing fits, or when
    the sums are too many.
    """
    names = list(options)
    formats = [list(options[name]) for name in names]
    sizes = [np.array([options[n][f][0] for f in fs], np.int64) for n, fs in zip(names, formats, strict=True)]
    damages = [np.array([options[n][f][1] for f in fs], np.float64) for n, fs in zip(names, formats, strict=True)]
    for name, found in zip(names, damages, strict=True):
        if not len(found) or not np.isfinite(found).all():
            raise ConfigError(f"{name} has no format or a damage that is nan or inf; measure its sensitivity again")
    least = sum(int(s.min()) for s in sizes)
    if least > budget:
        raise ConfigError(f"a size of {budget} bytes cannot be met: the smallest formats take {least}; allow more")
    price, known = _price(sizes, damages, budget)
    stages = _stages(sizes, damages, budget, price, known)
    chosen, at = [], int(np.argmin(stages[-1].damages)) if stages else 0
    for stage, fs in zip(reversed(stages), reversed(formats), strict=True):
        chosen.append(fs[int(stage.choices[at])])
        at = int(stage.parents[at])
    return dict(zip(names, reversed(chosen), strict=True))


def _price(sizes: list[NDArray[np.int64]], damages: list[NDArray[np.float64]], budget: int) -> tuple[float, float]:
    """Find the damage that a byte is worth by the best bound, by bisection; also returns the damage of what fits at
    that price."""

    def at(price: float) -> tuple[int, float]:
        picks = [int(np.lexsort((s, d + price * s))[0]) for s, d in zip(sizes, damages, strict=True)]
        return (
            sum(int(s[p]) for s, p in zip(sizes, picks, strict=True)),
            math.fsum(float(d[p]) for d, p in zip(damages, picks, strict=True)),
        )

    size, damage = at(0.0)
    if size <= budget:
        return 0.0, damage
    low, high = 0.0, 1e-12
    while at(high)[0] > budget:
        low, high = high, high * 16
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle)[0] > budget else (low, middle)
    return high, at(high)[1]


def _stages(
    sizes: list[NDArray[np.int64]], damages: list[NDArray[np.float64]], budget: int, price: float, known: float
) -> list[_PartialSums]:
    """A stage for each matrix in turn. What comes after it costs at least its `bounds`, at `price` a byte."""
    least_sizes = np.cumsum([0, *(int(s.min()) for s in reversed(sizes))])[::-1]
    bounds = np.cumsum([0.0, *(float((d + price * s).min()) for s, d in zip(sizes[::-1], damages[::-1], strict=True))])[
        ::-1
    ]
    slack = 1e-9 * (1 + abs(known) + sum(float(np.abs(d).max()) for d in damages))
    size, damage, stages = np.zeros(1, np.int64), np.zeros(1), []
    for i, (s, d) in enumerate(zip(sizes, damages, strict=True)):
        total, cost = (size[:, None] + s).ravel(), (damage[:, None] + d).ravel()
        hopeful = cost + bounds[i + 1] - price * (budget - total) <= known + slack
        kept = np.flatnonzero((total + least_sizes[i + 1] <= budget) & hopeful)
        kept = kept[np.lexsort((cost[kept], total[kept]))]
        before = np.concatenate(([np.inf], np.minimum.accumulate(cost[kept])[:-1]))
        kept = kept[cost[kept] < before]
        if len(kept) > MAX_STATES:
            raise ConfigError(f"{len(kept)} sums of sizes are too many to compare; give matrices of one shape one size")
        size, damage = total[kept], cost[kept]
        stages.append(_PartialSums(size, damage, kept // len(s), kept % len(s)))
    return stages
