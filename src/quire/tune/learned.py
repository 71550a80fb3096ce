"""What measurements teach of a model's predictions: a factor of this model, and one of each value of each option."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from quire.plan.planned_load import PlannedLoad
from quire.plan.predict import Prediction
from quire.tune.objective import Found, Objective
from quire.tune.space import Candidate, Space, Value

RIDGE = 0.05
"""Pull of each effect to none, beside one measurement of it: an effect measured once is believed to 95 %."""
START = 0.5
"""Share by which predictions may be off before anything was measured: the planner knows neither the size of blocks nor
what a machine does beside, and of a model of 6 M parameters it was off by a half."""
FITTED = 0.1
"""The same once effects are known of one run each."""
FLOOR = 0.02
"""By which they may be off at least: single runs differ by as much."""


UNSTABLE = 1e6
"""Milliseconds that are expected where requests come faster than they are served."""


def expected(prediction: Prediction, load: PlannedLoad, objective: Objective) -> dict[str, float]:
    """What `prediction` says in the names of measured figures. Means stand for percentiles."""
    at = objective.at
    found = {
        "output_tokens_per_s": prediction.output_tokens_per_s,
        "requests_per_s": prediction.requests_per_s,
        f"ttft_ms_{at}": prediction.ttft_ms,
        f"tpot_ms_{at}": prediction.tpot_ms,
        f"e2e_ms_{at}": prediction.e2e_ms,
    }
    found["stable"] = float(prediction.stable)
    if not prediction.stable:  # latencies of a queue that grows mean nothing, but for their order
        behind = UNSTABLE * load.rate / max(prediction.capacity, 1e-9)
        found |= {name: behind for name in found if "_ms" in name}
    over = max((found[name] / limit for name, limit in objective.targets.items()), default=0.0)
    found["goodput_per_s"] = prediction.requests_per_s / max(1.0, over)
    return found


class Observation(NamedTuple):
    """A candidate, what was expected of it by the planner alone, and what one or more runs found."""

    candidate: Candidate
    expected: Found
    found: Found


class Learned:
    """log(found / expected) = a + the sum of effects of values that are not the reference's, by ridge regression.

    `margin`: the share by which what is expected may be off: `START` before anything was measured, `FITTED` until
    predictions were made before their measurements (`check`), and then twice the root mean square of how far these were
    off.
    """

    def __init__(self, space: Space, objective: Objective, reference: Candidate) -> None:
        self._objective = objective
        self._names = tuple(dict.fromkeys((objective.metric, *objective.targets)))
        here = reference.options
        self._columns: dict[tuple[str, Value], int] = {}
        for name, values in space.axes.items():
            for value in values:
                if value != here[name]:
                    self._columns[name, value] = 1 + len(self._columns)
        self._effects: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
        self._off: list[float] = []

    def fit(self, seen: Sequence[Observation]) -> None:
        """Take these for all that is known."""
        seen = [one for one in seen if one.expected.get("stable", 1.0)] or seen
        rows = np.array([self._row(one.candidate) for one in seen])
        pull = np.diag([1e-9, *[RIDGE] * len(self._columns)])
        for name in self._names:
            ratios = np.array([math.log(max(s.found[name], 1e-9) / max(s.expected[name], 1e-9)) for s in seen])
            self._effects[name] = np.linalg.solve(rows.T @ rows + pull, rows.T @ ratios)

    def __call__(self, candidate: Candidate, expected: Found) -> dict[str, float]:
        """What is expected now."""
        if not self._effects:
            return dict(expected)
        row = self._row(candidate)
        return dict(expected) | {
            name: expected[name] * math.exp(min(20.0, float(row @ self._effects[name]))) for name in self._names
        }

    def check(self, candidate: Candidate, expected: Found, found: Found) -> None:
        """One was measured that `fit` had not seen."""
        guess = self(candidate, expected)
        self._off.append(max(abs(math.log(max(found[n], 1e-9) / max(guess[n], 1e-9))) for n in self._names))

    @property
    def margin(self) -> float:
        """Share by which what is expected may be off, either way."""
        if not self._effects:
            return START
        if not self._off:
            return FITTED
        spread = 2 * math.sqrt(sum(off * off for off in self._off) / len(self._off))
        return min(START, max(FLOOR, math.expm1(spread)))

    def hopeful(self, found: Found) -> dict[str, float]:
        """What a candidate might be if all that is expected of it is off to its good."""
        better = 1 + self.margin
        return {name: value / better if "_ms" in name else value * better for name, value in found.items()}

    def _row(self, candidate: Candidate) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        row = np.zeros(1 + len(self._columns))
        row[0] = 1
        for key in candidate.values:
            if key in self._columns:
                row[self._columns[key]] = 1
        return row


def best_of(scores: Mapping[Candidate, float]) -> Candidate:
    """Choose that with the highest score; of equal ones that which changes least, then the first."""
    return max(scores, key=lambda candidate: (scores[candidate], -candidate.changes))
