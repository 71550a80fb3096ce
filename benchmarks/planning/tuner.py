"""`quire tune` beside an exhaustive sweep of the same space under the same load: its time, and how far from the best.

    python -m benchmarks.planning.tuner sweep --work FOLDER --seconds 110  # again, until all are measured
    python -m benchmarks.planning.tuner tune --work FOLDER
    python -m benchmarks.planning.tuner beside --work FOLDER                 # the tuner's and the sweep's best in turns

The sweep starts each configuration and measures it `RUNS` times. Its best `RIVALS` and the tuner's choice are then
measured in turns, as the best of many noisy figures is better on paper than it is. The embedded model, one thread: the
second core of a shared machine comes and goes. Results: results/tuner.json.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from benchmarks.common.results import measure, parser_of
from quire.core.config import flat_config
from quire.figures.files import read_rows
from quire.figures.machine import this_machine
from quire.figures.statistics import compare, median
from quire.plan.planned_load import Slo, parse_load
from quire.tune.candidate_runner import CandidateRunner
from quire.tune.engines import EnginePool
from quire.tune.objective import Objective
from quire.tune.report import difference
from quire.tune.search import CandidateTrial
from quire.tune.session import TuneSession
from quire.tune.space import Candidate, Space, make_space, varied
from quire.tune.tune_options import TuneOptions

LOAD = "batch=16,input=64,output=16"
SPACE = (
    "max-num-seqs=2,4,8,16",
    "max-num-batched-tokens=64,128,256,512,1024",
    "block-size=8,16,64",
)
THREADS = 1
OBJECTIVE = Objective("throughput", Slo())
RUNS = 5
TURNS = 8
RIVALS = 3


def session(work: Path, name: str) -> TuneSession:
    """One with rows of its own."""
    options = TuneOptions(load=LOAD, vary=SPACE, output=str(work / f"{name}.toml"))
    return TuneSession(flat_config(threads=THREADS), {"threads": THREADS}, options)


def space() -> Space:
    """What is swept."""
    return make_space(flat_config(threads=THREADS), varied(SPACE))


def runs_of(engines: EnginePool) -> CandidateRunner:
    """As the tuner's own."""
    return CandidateRunner(engines, parse_load(LOAD), OBJECTIVE, 0, None)


def sweep(args: argparse.Namespace) -> dict[str, Any]:
    """Measure what is not measured yet, for so many seconds."""
    made, began = session(args.work, "sweep"), time.monotonic()
    kept = args.work / "sweep_seconds.json"
    spent: dict[str, float] = json.loads(kept.read_text()) if kept.exists() else {}
    for candidate in made.predicted:
        if str(candidate.values) in spent:
            continue
        if time.monotonic() - began > args.seconds:
            break
        start, trial = time.monotonic(), CandidateTrial(candidate, {})
        with closing(EnginePool(lambda config: made.guesses.planner(config).account.fixed)) as engines:
            runs = runs_of(engines)
            trial.samples = [runs.run(candidate, turn) for turn in range(RUNS)]
        spent[str(candidate.values)] = time.monotonic() - start
        made.journal.add(trial)
        kept.write_text(json.dumps(spent))
    best, value = swept(args.work)[0]
    return {
        "configurations": len(made.predicted),
        "measured": len(spent),
        "runs_of_each": RUNS,
        "seconds": round(sum(spent.values()), 1),
        "best": difference(best),
        "output_tokens_per_s": round(value, 1),
    }


def swept(work: Path) -> list[tuple[Candidate, float]]:
    """Configurations of the sweep by the medians of their runs, best first."""
    rows = {str(row.options): row for row in read_rows(work / "sweep.jsonl")}
    found = []
    for candidate in space().candidates:
        if (row := rows.get(str(candidate.options))) is not None:
            found.append((candidate, median(row.samples[OBJECTIVE.metric])))
    return sorted(found, key=lambda pair: -pair[1])


def tune(args: argparse.Namespace) -> dict[str, Any]:
    """A whole search, from nothing but the calibration of the machine."""
    (args.work / "tuned.jsonl").unlink(missing_ok=True)
    began = time.monotonic()
    made = session(args.work, "tuned")
    outcome = made.run(lambda trial: None)
    seconds = time.monotonic() - began
    assert outcome.best is not None
    (args.work / "tuned.json").write_text(json.dumps(outcome.best.candidate.values))
    return {
        "seconds": round(seconds, 1),
        "measured": len(outcome.trials),
        "runs": sum(len(trial.samples) for trial in outcome.trials),
        "margin": round(outcome.margin, 3),
        "best": difference(outcome.best.candidate),
        "output_tokens_per_s": round(made.objective.value(outcome.best.found), 1),
    }


def beside(args: argparse.Namespace) -> dict[str, Any]:
    """The tuner's choice and the `RIVALS` best of the sweep, each in an engine of its own, in turns."""
    told = tuple((name, value) for name, value in json.loads((args.work / "tuned.json").read_text()))
    tuned = next(candidate for candidate in space().candidates if candidate.values == told)
    rivals = [candidate for candidate, _ in swept(args.work)[:RIVALS]]
    found: dict[Candidate, list[float]] = {candidate: [] for candidate in (tuned, *rivals)}
    with ExitStack() as until:
        each = {c: runs_of(until.enter_context(closing(EnginePool(lambda config: 0)))) for c in found}
        for turn in range(TURNS):
            for candidate in reversed(found) if turn % 2 else found:
                found[candidate].append(OBJECTIVE.value(each[candidate].run(candidate, turn)))
    best = max(rivals, key=lambda c: median(found[c]))
    ratio = compare(found[tuned], found[best])
    return {
        "machine": this_machine().name,
        "load": LOAD,
        "threads": THREADS,
        "same": best == tuned,
        "tuned_to_best_of_sweep": round(ratio.ratio, 4),
        "interval": [round(ratio.interval.low, 4), round(ratio.interval.high, 4)],
        "output_tokens_per_s": {difference(c): [round(value, 1) for value in values] for c, values in found.items()},
    }


PARTS = {"sweep": sweep, "tune": tune, "beside": beside}


def main() -> None:
    """Run the parts that were asked for."""
    parser = parser_of(__doc__, PARTS)
    parser.add_argument("--work", type=Path, required=True, help="folder of what the parts leave for each other")
    parser.add_argument("--seconds", type=float, default=110.0, help="of the sweep at one time")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    measure(PARTS, args, "tuner")


if __name__ == "__main__":
    main()
