"""All commands under one name."""

from __future__ import annotations

from typing import Annotated

import typer

import quire
from quire.cli.bench import bench
from quire.cli.compress import compress
from quire.cli.demo import demo
from quire.cli.doctor import doctor
from quire.cli.evaluate import evaluate
from quire.cli.inspect import inspect
from quire.cli.plan import plan
from quire.cli.replay import replay
from quire.cli.run_batch import run_batch
from quire.cli.serve import serve
from quire.cli.talk import chat, generate
from quire.cli.train import train
from quire.cli.train_heads import train_heads
from quire.cli.tune import tune

app = typer.Typer(
    name="quire",
    help="An LLM inference engine, server and workbench.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long flags off
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"quire {quire.__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """An LLM inference engine, server and workbench."""


app.command("serve")(serve)
app.command("chat")(chat)
app.command("generate")(generate)
app.command("run-batch")(run_batch)
app.command("replay")(replay)
app.add_typer(bench, name="bench")
app.command("eval")(evaluate)
app.command("inspect")(inspect)
app.command("plan")(plan)
app.command("doctor")(doctor)
app.command("compress")(compress)
app.command("train")(train)
app.command("train-heads")(train_heads)
app.command("tune")(tune)
app.command("demo")(demo)
