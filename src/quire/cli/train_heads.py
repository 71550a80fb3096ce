"""`quire train-heads`: heads that guess ahead for a model, from text; the model stays as it is."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quire.cli.flags import ENGINE, option_command, set_model, to_engine
from quire.cli.params import PATH, argument, option, quiet_option
from quire.core.errors import ConfigError

if TYPE_CHECKING:
    from quire.core.config import EngineConfig
    from quire.speculate.train.loop import HeadTraining, HeadTrainingRun

HELD_OUT = 20
"""Every so many rows one is not learned from."""
PROMPT, MORE = 64, 64
"""Tokens of a held-out row that are given, and those that are then made by the model."""
BATCH, RATE = 4, 1e-3
METHODS = ("eagle3", "medusa")


@option_command(
    "train-heads",
    ENGINE,
    argument("target", metavar="MODEL", help="Folder or hub name; pydoc is the bundled model."),
    argument("out", metavar="OUT", type=PATH, help="The folder to write; a run that stopped goes on there."),
    option(
        "--data", type=PATH, multiple=True, required=True, help="Text file to learn from; may be given several times."
    ),
    option("--method", default=METHODS[0], help=f"One of {', '.join(METHODS)}."),
    option("--steps", type=click.IntRange(min=1), default=1000, help="Steps of training, of four rows each."),
    option("--length", type=click.IntRange(min=16), default=256, help="Tokens of a row."),
    option("--heads", type=click.IntRange(1, 16), default=4, help="Tokens to guess ahead."),
    quiet_option(),
    model_argument=False,
)
def train_heads(
    options: dict[str, Any],
    target: str,
    out: Path,
    data: tuple[Path, ...],
    method: str,
    steps: int,
    length: int,
    heads: int,
) -> None:
    """Train heads that draft for MODEL, and write them to OUT in their public layout."""
    if method not in METHODS:
        raise ConfigError(f"--method {method!r} is not one of {', '.join(METHODS)}", param="method")
    set_model(options, target)
    config = to_engine(options)
    from quire.speculate.train.loop import HeadTraining

    run, held = _run(config, HeadTraining(method, heads, steps, BATCH, length, RATE, config.model.seed), data, out)
    if run.resume():
        print(f"going on after step {run.step} of {steps}")
    _go(run)
    import torch

    run.write(getattr(torch, run.target.model.dtype))
    last = run.losses[-20:]
    print(f"{out}: {method} heads, {run.step} steps, loss {sum(last) / len(last):.3f}")
    _measure(config, method, out, held, heads)
    from quire.cli.show import show_next

    speculation = json.dumps({"method": method, "model": str(out), "num_speculative_tokens": heads})
    show_next((shlex.join(["quire", "serve", target, "--speculative-config", speculation]), "serve with them"))


def _run(
    config: EngineConfig, plan: HeadTraining, data: Sequence[Path], out: Path
) -> tuple[HeadTrainingRun, list[list[int]]]:
    """The run, and the rows it does not learn from."""
    import torch

    from quire.model.disk.checkpoint import resolve
    from quire.model.disk.tokenizer import tokenizer_folder
    from quire.speculate.train import methods
    from quire.speculate.train.loop import HeadTrainingRun
    from quire.speculate.train.target import Target
    from quire.store.hub import hub_of
    from quire.text.tokenizer import Tokenizer

    model = resolve(config.model.model, hub_of(config.model))
    tokenizer = Tokenizer.from_folder(tokenizer_folder(config.model, model))
    rows: list[list[int]] = []
    for path in data:
        try:
            tokens = tokenizer.encode(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--data {path}: cannot be read as UTF-8 text: {error}", param="data") from None
        rows += [tokens[at : at + plan.length] for at in range(0, len(tokens) - plan.length + 1, plan.length)]
    if len(rows) < 2:
        raise ConfigError(f"--data holds {len(rows)} rows of {plan.length} tokens; two are needed", param="data")
    torch.manual_seed(plan.seed)
    made = methods.METHODS[plan.method]
    target = Target(config, plan.length, made.taps)
    learned = [row for i, row in enumerate(rows) if i % HELD_OUT]
    return HeadTrainingRun(plan, made.heads(target, plan.heads, learned), target, learned, out), rows[::HELD_OUT]


def _go(run: HeadTrainingRun) -> None:
    from quire.core.progress import stage

    with stage("training heads", run.plan.steps, done=run.step) as at:
        run.go(lambda step, loss: at.update(step, note=f"loss {loss:.3f}"))


def _measure(config: EngineConfig, method: str, out: Path, held: list[list[int]], heads: int) -> None:
    """Load what was written, let it draft for greedy continuations of held-out rows, and print what was kept."""
    from msgspec.structs import replace

    from quire.core.config import SpeculationConfig
    from quire.core.params import SamplingParams
    from quire.core.progress import stage
    from quire.core.request import Request
    from quire.engine.start import start_engine

    asked = {"method": method, "model": str(out), "num_speculative_tokens": heads, "adaptive": False}
    speculation = SpeculationConfig(speculative_config=json.dumps(asked))
    engine = start_engine(replace(config, speculation=speculation))
    held = held[:64]
    for i, row in enumerate(held):
        params = SamplingParams(max_tokens=MORE, temperature=0.0, ignore_eos=True)
        engine.submit(Request(id=str(i), prompt=tuple(row[:PROMPT]), params=params, seed=0, arrival=0.0))
    with stage("measuring heads on held-out rows", len(held)) as at:
        while engine.has_work:
            ended = sum(output.finish_reason is not None for output in engine.step())
            at.advance(ended)
    assert engine.speculator is not None
    totals = engine.speculator.totals
    drafts = max(1, totals.drafts)
    print(f"held out: {1 + totals.accepted / drafts:.2f} tokens a step over {totals.drafts} drafts")
    for place, kept in enumerate(totals.accepted_per_pos, 1):
        print(f"  guess {place} kept: {100 * kept / drafts:.1f} %")
