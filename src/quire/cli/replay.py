"""`quire replay`: a recorded run again, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quire.bench.loads import ReplayLoad
from quire.cli.flags import ENGINE, option_command, to_engine
from quire.cli.measure import facts, output_option
from quire.cli.params import PATH, argument
from quire.core.options.values import read_options
from quire.engine.engine_options import KNOWN

if TYPE_CHECKING:
    from quire.bench.replay import ReplayResult
    from quire.engine.record.recording import RecordedRun

KV_FLAGS = {"ctk", "ctv", "kv_cache_dtype"}


@option_command(
    "replay",
    {"Replay": ReplayLoad} | ENGINE,
    argument("folder", type=PATH, help="What `quire serve --record` wrote."),
    output_option(),
    model_argument=False,
)
def replay(options: dict[str, Any], folder: Path, output: Path | None) -> None:
    """Run a recording again and compare every token with those that were recorded; exit code 1 where one differs.

    The engine has the recorded options; those given here take their place, and most must not change a bit.
    """
    load = read_options(ReplayLoad, options)
    from quire.engine.record.recording import read_run

    run = read_run(folder, load.run)
    _describe(run)
    from quire.bench.replay import Replay, doubts, options_of
    from quire.bench.report import report
    from quire.core.progress import loading_bar
    from quire.engine.local import LocalEngine

    given = {name: value for name, value in options.items() if name not in ReplayLoad.__struct_fields__}
    recorded = {k: v for k, v in options_of(run).items() if not (k in KV_FLAGS and KV_FLAGS & set(given))}
    config = to_engine({k: v for k, v in recorded.items() if k in KNOWN} | given)
    with loading_bar() as progress:
        engine = LocalEngine(config, progress)
    for doubt in doubts(run, engine.info):
        print(f"bits may differ: {doubt}")
    outcome = Replay(run, engine, load.speed).go()
    report("replay", load, facts(engine), outcome.results(), output)
    engine.close()
    _judge(run, outcome)


def _describe(run: RecordedRun) -> None:
    began, last = run.began, run.asked[-1].at if run.asked else 0.0
    print(f"run {run.name}: {len(run.asked)} requests within {last:.1f} s, {began.info.model}, quire {began.version}")
    if not began.prompts:
        print("synthetic: prompts were not recorded. Random tokens of the same lengths run, and nothing is compared")
    if run.lost:
        print(f"{run.lost} lines of the recording are missing")


def _judge(run: RecordedRun, outcome: ReplayResult) -> None:
    """Say what was found; exit code 1 for a difference, or where something could not be run."""
    for count, what in (
        (outcome.unfinished, "requests have no end in the recording: they ran, and nothing is compared with them"),
        (outcome.skipped, "requests were left before their first token: they did not run"),
        (outcome.with_images, "requests had images, whose pixels are not recorded: they did not run"),
    ):
        if count:
            print(f"{count} {what}")
    for each in outcome.differences[:8]:
        where = f"request {each.request_id}, sequence {each.index}, token {each.position}"
        print(f"different: {where}: {each.recorded} was recorded, {each.replayed} came")
    if run.began.prompts:
        same = outcome.compared - len(outcome.differences)
        print(f"{same} of {outcome.compared} sequences are the same, bit for bit ({outcome.tokens} tokens)")
    if outcome.differences or (outcome.errors and not run.began.prompts):
        raise click.exceptions.Exit(1)
