"""The search over configurations: on figures made up by a formula, whose best is known."""

from __future__ import annotations

import math
import random

import pytest

from quire.core.config import flat_config
from quire.core.errors import ConfigError
from quire.plan.planned_load import Slo
from quire.tune.learned import FLOOR, START, Learned, Observation
from quire.tune.objective import Objective
from quire.tune.search import CandidateTrial, Search, SearchBudget
from quire.tune.space import Candidate, Space, make_space

THROUGHPUT = Objective("throughput", Slo())
AXES = {
    "max_num_seqs": (4, 8, 16, 32),
    "max_num_batched_tokens": (64, 128, 256, 512, 1024),
    "block_size": (8, 16, 64),
    "enable_prefix_caching": (True, False),
}


class Machine:
    """Figures by a formula: what the planner knows, what it does not, and noise; `calls`: what was run."""

    def __init__(self, noise: float = 0.0, planner: float = 0.0) -> None:
        """`noise` of a run, and how far the planner is off, by configuration."""
        self.noise, self.planner, self.calls = noise, planner, list[tuple[Candidate, int]]()
        self.refuses: Candidate | None = None

    def guess(self, candidate: Candidate) -> dict[str, float]:
        """The planner's: nothing of blocks, and three times too much."""
        options = candidate.options
        seqs, tokens = float(options["max_num_seqs"] or 0), float(options["max_num_batched_tokens"] or 0)
        off = 1 + self.planner * random.Random(str(candidate.values)).uniform(-1, 1)
        fast = 3000 * math.log2(seqs) / 5 / (1 + abs(math.log2(tokens / 256)) / 4) * off
        return {"output_tokens_per_s": fast, "ttft_ms_mean": seqs * 5 + tokens / 8, "tpot_ms_mean": 1.0 + seqs / 10}

    def true(self, candidate: Candidate) -> dict[str, float]:
        """What a machine without noise would find."""
        found = self.guess(candidate)
        exact = Machine().guess(candidate)["output_tokens_per_s"]
        blocks = {8: 0.9, 16: 1.0, 64: 1.08}[int(candidate.options["block_size"] or 0)]
        return found | {"output_tokens_per_s": exact / 3 * blocks}

    def run(self, candidate: Candidate, round_: int) -> dict[str, float]:
        """One run."""
        if candidate == self.refuses:
            raise ConfigError("too much")
        self.calls.append((candidate, round_))
        noise = 1 + self.noise * random.Random(f"{candidate.values}{round_}").uniform(-1, 1)
        return {name: value * noise for name, value in self.true(candidate).items()}


def space() -> Space:
    return make_space(flat_config(), AXES)


def search(machine: Machine, objective: Objective = THROUGHPUT, **more: object) -> Search:
    made = space()
    guesses = {candidate: machine.guess(candidate) for candidate in made.candidates}
    return Search(made, guesses, objective, machine, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("noise", "planner"), [(0.0, 0.0), (0.02, 0.0), (0.02, 0.1), (0.05, 0.2)])
def test_the_best_is_found_with_a_fraction_of_the_runs(noise: float, planner: float) -> None:
    machine = Machine(noise, planner)
    outcome = search(machine).run()
    values = {c: machine.true(c)["output_tokens_per_s"] for c in space().candidates}
    assert outcome.best is not None and not outcome.stopped and outcome.predicted == len(values) == 120
    assert values[outcome.best.candidate] >= 0.97 * max(values.values())
    assert len(outcome.trials) <= 30 and len(machine.calls) <= 80, "of 120, or of 600 for five runs of each"
    assert outcome.best.candidate.options["block_size"] == 64, "which the planner says nothing of"


def test_an_order_is_the_same_for_a_seed() -> None:
    one, other, third = Machine(0.02), Machine(0.02), Machine(0.02)
    search(one).run(), search(other).run(), search(third, limits=SearchBudget(seed=1)).run()
    assert one.calls == other.calls and one.calls != third.calls


def test_of_equal_ones_that_which_changes_least_is_chosen() -> None:
    outcome = search(Machine()).run()
    assert outcome.best is not None and outcome.best.candidate.options["enable_prefix_caching"] is True


def test_what_was_measured_is_not_measured_again() -> None:
    machine = Machine(0.02)
    kept: dict[Candidate, list[dict[str, float]]] = {}

    def tell(trial: CandidateTrial) -> None:
        kept[trial.candidate] = list(trial.samples)
        if sum(map(len, kept.values())) == 9:
            raise KeyboardInterrupt

    cut = search(machine, tell=tell).run()
    assert cut.stopped == "interrupted" and cut.best is not None and len(machine.calls) == 9
    again = Machine(0.02)
    outcome = search(again, known=kept).run()
    assert not set(again.calls) & set(machine.calls)
    assert outcome.best is not None
    whole = search(Machine(0.02)).run().best
    assert whole is not None and outcome.best.candidate == whole.candidate


def test_a_budget_ends_it_with_the_best_so_far() -> None:
    outcome = search(Machine(), limits=SearchBudget(budget=1e-9)).run()
    assert "budget" in outcome.stopped and outcome.best is None and not outcome.meets
    assert search(Machine(), limits=SearchBudget(budget=60)).run().stopped == ""
    calibrated = search(Machine(), limits=SearchBudget(budget=60, spent=61)).run()
    assert "budget" in calibrated.stopped, "what was calibrated before is of the budget"


def test_targets_come_first() -> None:
    within = Objective("throughput", Slo(itl=2.0))
    outcome = search(Machine(0.01), within).run()
    assert outcome.meets and outcome.best is not None and outcome.best.candidate.options["max_num_seqs"] == 8
    never = search(Machine(0.01), Objective("throughput", Slo(itl=0.5))).run()
    assert not never.meets and never.best is not None
    assert never.best.candidate.options["max_num_seqs"] == 4, "the closest"


def test_what_the_engine_refuses_is_left_out_and_counted() -> None:
    machine = Machine()
    first = search(machine).run().best
    assert first is not None
    machine.refuses = first.candidate
    outcome = search(machine).run()
    assert outcome.best is not None and outcome.best.candidate != first.candidate
    assert outcome.space.refused == {"too much": 1}


def test_a_space_of_one_is_measured_once() -> None:
    made = make_space(flat_config(), {"max_num_seqs": (8,), "max_num_batched_tokens": (256,), "block_size": (16,)})
    machine = Machine()
    outcome = Search(made, {c: machine.guess(c) for c in made.candidates}, THROUGHPUT, machine).run()
    assert outcome.best is not None and len(machine.calls) == 1


def test_predictions_learn_a_factor_and_effects_of_values() -> None:
    made, machine = space(), Machine()
    reference = made.candidates[0]
    learned = Learned(made, THROUGHPUT, reference)
    assert learned.margin == START
    near = [c for c in made.candidates if sum(a != b for a, b in zip(c.values, reference.values, strict=True)) < 2]
    learned.fit([Observation(c, machine.guess(c), machine.true(c)) for c in near])
    name = "output_tokens_per_s"
    for candidate in made.candidates:
        found, exact = learned(candidate, machine.guess(candidate))[name], machine.true(candidate)[name]
        assert found == pytest.approx(exact, rel=0.05)
        learned.check(candidate, machine.guess(candidate), machine.true(candidate))
    assert FLOOR <= learned.margin < 0.1


def test_scores() -> None:
    within = Objective("itl", Slo(ttft=100.0), "p99")
    good, late = {"tpot_ms_p99": 5.0, "ttft_ms_p99": 90.0}, {"tpot_ms_p99": 1.0, "ttft_ms_p99": 150.0}
    assert within.score(good) == 1 / 5 and within.score(late) == -1.5 and not within.meets(late)
    goodput = Objective("goodput", Slo(itl=3.0))
    assert goodput.score({"goodput_per_s": 2.0, "tpot_ms_mean": 9.0}) == 2.0 and goodput.of_requests == {"tpot": 3.0}
