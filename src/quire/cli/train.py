"""`quire train`: adapters, fake quantization, recovery and students, from text or from a teacher."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.flags import option_command
from quire.cli.params import PATH, argument
from quire.compress.train.options import TrainOptions
from quire.core.options.values import read_options

if TYPE_CHECKING:
    from rich.progress import Progress

    from quire.compress.train.job import TrainingJob

LAST = 20
"""Steps whose mean loss is told at the end."""


@option_command(
    "train",
    {"Training": TrainOptions},
    argument("model", metavar="MODEL", help="Folder or hub name; pydoc is the bundled model."),
    argument("out", metavar="OUT", type=PATH, help="The folder to write; a run that stopped goes on there."),
    model_argument=False,
)
def train(options: dict[str, Any], model: str, out: Path) -> None:
    """Train MODEL, and write an adapter in PEFT's layout or a model to OUT."""
    given = read_options(TrainOptions, options)
    given.validate()
    from quire.compress.train import job

    if given.merge is not None:
        job.write_merged(model, Path(given.merge), out)
        print(f"{out}: {model} with {given.merge} merged in")
        return
    with _bar() as bar:
        made = _prepared(model, out, given, bar)
        for note in made.notes:
            bar.console.print(note, highlight=False)
        if made.run.step:
            bar.console.print(f"going on after step {made.run.step} of {given.steps}", highlight=False)
        task = bar.add_task("training", total=given.steps, completed=made.run.step, note="")
        made.run.go(lambda step, loss: bar.update(task, completed=step, note=f"loss {loss:.3f}"))
    made.write()
    last = made.run.losses[-LAST:]
    print(f"{out}: {given.method}, {made.run.step} steps, loss {sum(last) / len(last):.3f}")


def _prepared(model: str, out: Path, options: TrainOptions, bar: Progress) -> TrainingJob:
    """The job; what comes before its first step has a bar of its own."""
    from quire.compress.train.job import prepare

    tasks: dict[str, Any] = {}

    def tell(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=total, note="")
        bar.update(tasks[what], completed=done)

    return prepare(model, out, options, tell)


def _bar() -> Progress:
    """Progress on standard error, with the time that is left."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    from quire.engine.processes.progress import LongProgress

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    return LongProgress(*columns)
