"""The search: predict all, drop what cannot be best, learn from few, then halve those that are left.

Successive halving (Jamieson & Talwalkar 2016): all that are left run in turns, the worse half goes, the others run
longer. What goes into it is chosen as sequential model-based optimization does (Hutter et al. 2011), with the planner
for a model, which measurements correct.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.core.errors import ConfigError, QuireError
from quire.figures.statistics import compare, median
from quire.tune.learned import Learned, Observation, best_of
from quire.tune.objective import Found, Objective
from quire.tune.space import Candidate, Space

log = logging.getLogger("quire.tune")
GAIN = 0.01
"""Configurations that are so close are equal."""
PATIENCE = 4
"""Measurements, in the order of what is expected, that find nothing better by `GAIN` before the search ends."""
NOISE = 0.05
"""By which single runs may differ, so that what is so far from the best stays."""
FINALISTS = 5
BLOCK = 2
"""Runs in a row of one whose turn it is: a change of engines takes as long as a run."""
ROUNDS = 12
"""Of the last two."""


@dataclass
class CandidateTrial:
    """A candidate that was measured: the first run by itself, later ones in turns with others."""

    candidate: Candidate
    expected: Found
    samples: list[dict[str, float]] = field(default_factory=list)

    @property
    def found(self) -> dict[str, float]:
        """Medians, of runs in turns where there are any."""
        runs = self.samples[1:] or self.samples
        return {name: median([run[name] for run in runs if name in run]) for name in runs[0]}

    def values(self, objective: Objective) -> list[float]:
        """The objective of each run in turns."""
        return [objective.value(run) for run in self.samples[1:]]


@dataclass
class TuneResult:
    """What a search found. `best`: None where nothing was measured; `stopped`: why it ended early, or ""."""

    space: Space
    objective: Objective
    trials: list[CandidateTrial]
    best: CandidateTrial | None
    expected: dict[Candidate, dict[str, float]]
    margin: float
    predicted: int
    pruned: int
    finalists: int
    seconds: float
    stopped: str = ""

    @property
    def meets(self) -> bool:
        """Whether the best one keeps the targets."""
        return self.best is not None and self.objective.meets(self.best.found)


class Measure(Protocol):
    """Runs a candidate once; the same round gives all the same requests."""

    def run(self, candidate: Candidate, round_: int) -> dict[str, float]:
        """Figures. `ConfigError` where the engine refuses it."""
        ...


class OutOfTime(Exception):
    """The budget is spent."""


@dataclass(frozen=True)
class SearchBudget:
    """Seconds at most (0: no bound), of which `spent` went before the search, and the seed of the order in which
    candidates take turns."""

    budget: float = 0.0
    seed: int = 0
    spent: float = 0.0


class Search:
    """`guesses`: candidate -> what the planner expects; `tell`: hears of every run."""

    def __init__(
        self,
        space: Space,
        guesses: dict[Candidate, dict[str, float]],
        objective: Objective,
        measure: Measure,
        limits: SearchBudget = SearchBudget(),
        tell: Callable[[CandidateTrial], None] = lambda trial: None,
        known: dict[Candidate, list[dict[str, float]]] | None = None,
    ) -> None:
        """`known`: runs of an earlier search, by candidate, which are not made again."""
        self._space, self._guesses, self._objective = space, guesses, objective
        self._measure, self._limits, self._tell, self._known = measure, limits, tell, known or {}
        self._trials: dict[Candidate, CandidateTrial] = {}
        self._began = time.monotonic()
        self._finalists = 0
        self._first = best_of(self._scores(guesses))
        self._learned = Learned(space, objective, self._first)

    def run(self) -> TuneResult:
        """Run to the end, or until the budget is spent or somebody interrupts it."""
        predicted, stopped = len(self._guesses), ""
        try:
            self._probe()
            self._climb()
            self._halve()
        except KeyboardInterrupt:
            stopped = "interrupted"
        except OutOfTime:
            stopped = f"the budget of {self._limits.budget:g} s was spent"
        trials = sorted(self._trials.values(), key=lambda t: -self._score(t))
        return TuneResult(
            self._space, self._objective, trials, self._chosen(), self._expectations(), self._learned.margin,
            predicted, len(self._guesses) - len(trials), self._finalists, time.monotonic() - self._began, stopped,
        )  # fmt: skip

    def _probe(self) -> None:
        """The one that is expected to be best, what would run untuned, and each single change of the first that might
        be better: these say what each value does here, of which the planner does not know all.
        """
        usual = min(self._guesses, key=lambda candidate: candidate.changes)
        near = [c for c in self._guesses if self._distance(c, self._first) == 1]
        least = self._objective.score(self._guesses[self._first])
        hopeful = [c for c in near if self._objective.score(self._learned.hopeful(self._guesses[c])) >= least]
        for candidate in dict.fromkeys((usual, self._first, *hopeful)):
            self._try(candidate)
        self._fit()

    def _climb(self) -> None:
        """Measure in the order of what is expected, until no other might be better, or several were not."""
        idle = 0
        while idle < PATIENCE:
            left = {c: self._learned(c, guess) for c, guess in self._guesses.items() if c not in self._trials}
            best = max(map(self._score, self._trials.values()), default=float("-inf"))
            hopeful = {c: found for c, found in left.items() if self._beats(self._learned.hopeful(found), best)}
            if not hopeful:
                return
            candidate = best_of({c: self._objective.score(found) for c, found in hopeful.items()})
            trial = self._try(candidate)
            if trial is None:
                continue
            self._learned.check(candidate, self._guesses[candidate], trial.samples[0])
            self._fit()
            idle = 0 if self._beats(trial.found, best) else idle + 1

    def _halve(self) -> None:
        """Let those that may be best run in turns; the worse half goes each time, the others run twice as often."""
        left = sorted(self._trials.values(), key=lambda t: -self._score(t))
        if not left:
            return
        least = self._score(left[0])
        least = least * (1 - NOISE) if least > 0 else least * (1 + NOISE)
        left = [trial for trial in left if self._score(trial) >= least][:FINALISTS]
        self._finalists, rounds = len(left), 2
        while len(left) > 1 and len(left[0].samples) <= ROUNDS:
            self._turns(left, rounds)
            left.sort(key=lambda t: -self._score(t))
            left = [left[0], *(trial for trial in left[1:] if not self._differs(left[0], trial))]
            left, rounds = left[: max(2, -(-len(left) // 2))], 2 * rounds
            if all(self._equal(left[0], trial) for trial in left[1:]):
                return

    def _turns(self, left: Sequence[CandidateTrial], rounds: int) -> None:
        first = len(left[0].samples)
        for begin in range(first, first + rounds, BLOCK):
            order = list(left)
            random.Random(f"{self._limits.seed}/{begin}").shuffle(order)
            for trial in order:
                for turn in range(begin, begin + BLOCK):
                    self._sample(trial, turn)

    def _differs(self, best: CandidateTrial, other: CandidateTrial) -> bool:
        """Whether `other` is surely worse: `Comparison.significant`, which takes six rounds."""
        if self._score(other) < 0 < self._score(best):
            return len(other.samples) > 6
        found = compare(best.values(self._objective), other.values(self._objective))
        return found.significant and found.ratio > 1

    def _equal(self, best: CandidateTrial, other: CandidateTrial) -> bool:
        """Whether the medians are within `GAIN`, after as many rounds as tell."""
        values = [median(trial.values(self._objective)) for trial in (best, other)]
        return len(other.samples) > 6 and values[0] <= (1 + GAIN) * values[1]

    def _chosen(self) -> CandidateTrial | None:
        """Choose of those within `GAIN` of the best of the last turns, that which changes least."""
        if not self._trials:
            return None
        most = max(len(trial.samples) for trial in self._trials.values())
        last = [trial for trial in self._trials.values() if len(trial.samples) == most]
        best = max(last, key=self._score)
        close = [trial for trial in last if self._score(trial) >= self._score(best) / (1 + GAIN)]
        return min(close, key=lambda t: (t.candidate.changes, -self._score(t))) if self._score(best) > 0 else best

    def _try(self, candidate: Candidate) -> CandidateTrial | None:
        """The first run; None where the engine refuses the candidate, which is left out then."""
        trial = CandidateTrial(candidate, self._guesses[candidate])
        try:
            self._sample(trial, 0)
        except ConfigError as error:
            self._refuse(candidate, error)
            return None
        self._trials[candidate] = trial
        return trial

    def _refuse(self, candidate: Candidate, error: QuireError) -> None:
        log.info("%s is left out: %s", candidate.options, error.message)
        self._space.refuse(candidate, error)
        del self._guesses[candidate]
        if not self._guesses:
            raise ConfigError(f"the engine refuses every configuration; the last one: {error.message}")

    def _sample(self, trial: CandidateTrial, turn: int) -> None:
        known = self._known.get(trial.candidate, [])
        if turn < len(known):
            trial.samples.append(known[turn])
            return
        if self._limits.budget and self._limits.spent + time.monotonic() - self._began > self._limits.budget:
            raise OutOfTime
        trial.samples.append(self._measure.run(trial.candidate, turn))
        self._tell(trial)

    def _fit(self) -> None:
        self._learned.fit([Observation(t.candidate, t.expected, t.samples[0]) for t in self._trials.values()])

    def _beats(self, found: Found, best: float) -> bool:
        """Whether a score is better by more than makes no difference."""
        score = self._objective.score(found)
        return score > best * (1 + GAIN) if best > 0 else score > best * (1 - GAIN)

    def _score(self, trial: CandidateTrial) -> float:
        return self._objective.score(trial.found)

    def _scores(self, found: dict[Candidate, dict[str, float]]) -> dict[Candidate, float]:
        return {candidate: self._objective.score(each) for candidate, each in found.items()}

    def _expectations(self) -> dict[Candidate, dict[str, float]]:
        return {candidate: self._learned(candidate, guess) for candidate, guess in self._guesses.items()}

    @staticmethod
    def _distance(one: Candidate, other: Candidate) -> int:
        return sum(a != b for a, b in zip(one.values, other.values, strict=True))
