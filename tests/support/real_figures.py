"""Figures that tests on real weights measure: kept where QUIRE_REAL_FIGURES is set (`make real`)."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.results import keep


def note(name: str, figures: dict[str, Any]) -> None:
    """Have the figures of one test lie in benchmarks/results/real_weights.json, if they are to be kept."""
    if os.environ.get("QUIRE_REAL_FIGURES"):
        keep("real_weights", {name: figures})


def ranks(values: NDArray[Any]) -> NDArray[np.float64]:
    """The rank of each value [n]; equal ones share the mean of theirs."""
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    made: NDArray[np.float64] = (ends - (counts - 1) / 2)[where]
    return made


def spearman(one: NDArray[Any], other: NDArray[Any]) -> float:
    """The rank correlation of two rows of values [n]."""
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])
