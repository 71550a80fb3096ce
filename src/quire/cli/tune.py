"""`quire tune`: the best options for a load and its targets on this machine, measured, as a file for `quire serve`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quire.cli.flags import ENGINE, option_command, to_engine
from quire.core.files import write_whole
from quire.core.options.values import read_options
from quire.engine.engine_options import KNOWN
from quire.tune.tune_options import TuneOptions

if TYPE_CHECKING:
    from rich.console import Console

    from quire.tune.search import CandidateTrial, TuneResult
    from quire.tune.session import TuneSession


@option_command("tune", {"Tuning": TuneOptions} | ENGINE)
def tune(options: dict[str, Any]) -> None:
    """Search for the best configuration under a load: all are predicted, few measured; options that are given stay.

    Run again, it goes on with what was measured. Exit code 1: none keeps the targets.
    """
    asked, base = read_options(TuneOptions, options), to_engine(options)
    asked.validate()
    from rich.console import Console

    from quire.tune.journal import check_output
    from quire.tune.report import MARK, config_text, print_outcome
    from quire.tune.session import TuneSession

    check_output(Path(asked.output), MARK)
    console = Console(highlight=False)
    given = {name: value for name, value in options.items() if name in KNOWN}
    session = TuneSession(base, given, asked)
    with _bar(len(session.predicted)) as tell:
        outcome = session.run(tell)
    print_outcome(outcome, console)
    if outcome.best is not None:
        words = asked.load + (f" within {asked.slo} ({asked.slo_at})" if asked.slo else "")
        write_whole(Path(asked.output), config_text(outcome, given, words).encode())
        console.print(f"{asked.output}: for quire serve --config; rows in {session.rows}", markup=False)
    raise click.exceptions.Exit(_ended(session, outcome, console))


def _ended(session: TuneSession, outcome: TuneResult, console: Console) -> int:
    """What is to be said at the end, and the exit code."""
    if outcome.stopped:
        console.print(f"not to the end: {outcome.stopped}; run again, it goes on", markup=False)
    if outcome.best is not None and not outcome.meets:
        found, targets = outcome.best.found, outcome.objective.targets
        misses = ", ".join(f"{name} {found[name]:,.1f} of {limit:g}" for name, limit in targets.items())
        console.print(f"no configuration keeps the targets; the closest has {misses}", markup=False)
        console.print(session.needed(outcome), markup=False)
    if outcome.stopped == "interrupted":
        return 130
    return 0 if outcome.meets else 1


@contextmanager
def _bar(candidates: int) -> Iterator[Callable[[CandidateTrial], None]]:
    """Progress on standard error: how many runs, and the last one's figures."""
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    from quire.engine.processes.progress import LongProgress
    from quire.tune.report import difference

    runs = 0
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with LongProgress(*columns, transient=True) as bar:
        task = bar.add_task(f"{candidates:,} configurations predicted", total=None)

        def tell(trial: CandidateTrial) -> None:
            nonlocal runs
            runs += 1
            bar.update(task, description=f"run {runs}: {difference(trial.candidate)}")

        yield tell
