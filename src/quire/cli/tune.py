"""`quire tune`: the best options for a load and its targets on this machine, measured, as a file for `quire serve`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quire.cli.flags import ENGINE, option_command, to_engine
from quire.cli.params import quiet_option
from quire.core.files import write_whole
from quire.core.options.values import read_options
from quire.engine.engine_options import KNOWN
from quire.tune.tune_options import TuneOptions

if TYPE_CHECKING:
    from rich.console import Console

    from quire.tune.search import CandidateTrial, TuneResult
    from quire.tune.session import TuneSession


@option_command("tune", {"Tuning": TuneOptions} | ENGINE, quiet_option())
def tune(options: dict[str, Any]) -> None:
    """Search for the best configuration under a load: all are predicted, few measured; options that are given stay.

    Run again, it goes on with what was measured. Exit code 1: none keeps the targets.
    """
    asked, base = read_options(TuneOptions, options), to_engine(options)
    asked.validate()
    from rich.console import Console

    from quire.core.progress import stage
    from quire.tune.journal import check_output
    from quire.tune.report import MARK, config_text, print_outcome
    from quire.tune.session import TuneSession

    check_output(Path(asked.output), MARK)
    console = Console(highlight=False)
    given = {name: value for name, value in options.items() if name in KNOWN}
    with stage("tune") as at:
        session = TuneSession(base, given, asked)
        at.update(note=f"{len(session.predicted):,} configurations predicted")
        outcome = session.run(lambda trial: at.advance(note=_latest(trial)))
    print_outcome(outcome, console)
    if outcome.best is not None:
        words = asked.load + (f" within {asked.slo} ({asked.slo_at})" if asked.slo else "")
        write_whole(Path(asked.output), config_text(outcome, given, words).encode())
        console.print(f"{asked.output}: for quire serve --config; rows in {session.rows}", markup=False)
        _tell(session, outcome)
    raise click.exceptions.Exit(_ended(session, outcome, console))


def _tell(session: TuneSession, outcome: TuneResult) -> None:
    """What was won and lost against what runs untuned, and what to type next."""
    from quire.cli.show import show_columns, show_next
    from quire.tune.report import won

    rows = won(outcome, lambda candidate: session.guesses.planner(candidate.config).account.fixed)
    if rows:
        show_columns(("", "untuned", "tuned", "change", ""), [row.cells for row in rows])
    model = [session.base.model.model] if session.base.model.model else []
    show_next(
        (shlex.join(["quire", "serve", "--config", session.options.output]), "serve as it was found"),
        (shlex.join(["quire", "plan", *model, "--load", session.options.load]), "what the planner would change first"),
    )


def _latest(trial: CandidateTrial) -> str:
    """What the last run was of."""
    from quire.tune.report import difference

    return f"runs, the last of {difference(trial.candidate)}"


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
