"""`quire train`: adapters, fake quantization, recovery and students, from text or from a teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.cli.flags import option_command
from quire.cli.params import PATH, argument, quiet_option
from quire.compress.train.options import TrainOptions
from quire.core.options.values import read_options

LAST = 20
"""Steps whose mean loss is told at the end."""


@option_command(
    "train",
    {"Training": TrainOptions},
    argument("model", metavar="MODEL", help="Folder or hub name; pydoc is the bundled model."),
    argument("out", metavar="OUT", type=PATH, help="The folder to write; a run that stopped goes on there."),
    quiet_option(),
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
    from quire.core.progress import named_stages, stage

    with stage("train") as work:
        with named_stages() as tell:
            made = job.prepare(model, out, given, tell)
        for note in made.notes:
            work.say(note)
        begun = made.run.step
        if begun:
            work.say(f"going on after step {begun} of {given.steps}")
        with stage("steps", given.steps, done=begun) as at:
            made.run.go(lambda step, loss: at.update(step, note=f"loss {loss:.3f}"))
        made.write()
    last = made.run.losses[-LAST:]
    print(f"{out}: {given.method}, {made.run.step} steps, loss {sum(last) / len(last):.3f}")
