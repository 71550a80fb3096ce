"""`quire train`: adapters, fake quantization, recovery and students, from text or from a teacher."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.flags import option_command
from quire.cli.params import PATH, argument, quiet_option
from quire.compress.train.options import TrainOptions
from quire.core.options.values import read_options

if TYPE_CHECKING:
    from quire.compress.train.job import TrainingJob

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
        from quire.cli.show import show_next

        show_next((f"quire serve {shlex.quote(str(out))}", "serve it"))
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
    print(f"{out}: {given.method}, {made.run.step} steps, loss {_mean(last):.3f}")
    _tell(model, out, made)


def _tell(model: str, out: Path, made: TrainingJob) -> None:
    """What was won and lost, and what to type next."""
    from quire.cli.show import show_columns, show_next, size
    from quire.figures.changes import changed, with_text
    from quire.model.describe import describe

    losses, few = made.run.losses, min(LAST, max(1, len(made.run.losses) // 2))
    loss = changed("loss on what it learned from", _mean(losses[:few]), _mean(losses[-few:]), ".3f")
    before = describe(model).bytes_on_disk
    after = sum(path.stat().st_size for path in out.iterdir() if path.suffix == ".safetensors")
    name = "weights on disk" if made.adapter is None else "weights on disk, of the adapter"
    disk = with_text(changed(name, before, after), size(before), size(after))
    show_columns(("", "before", "after", "change", ""), [loss.cells, disk.cells])
    folder, source = shlex.quote(str(out)), shlex.quote(model)
    if made.adapter is None:
        show_next(
            (f"quire serve {folder}", "serve it"),
            (f"quire eval {folder} --beside {source}", "what it can do beside the model before"),
        )
        return
    show_next(
        (f"quire serve {source} --enable-lora --lora-modules {shlex.quote(out.name)}={folder}", "serve it"),
        (f"quire train {source} {folder}-merged --merge {folder}", "make one model of both"),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
