"""`quire bench latency`, `throughput` and `serve`: an engine's own speed, and a server under load."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from quire.bench.loads import LatencyLoad, ServeLoad, ThroughputLoad
from quire.cli.flags import ENGINE, option_command, to_arguments, to_engine
from quire.cli.params import PATH, Option, option, quiet_option
from quire.core.options.command_aliases import LATENCY, SERVE, THROUGHPUT
from quire.core.options.values import read_options

if TYPE_CHECKING:
    from quire.bench.serving import ServingResult
    from quire.bench.sweep import SweepPoint
    from quire.engine.local import LocalEngine
    from quire.figures.files import Appending

Load = TypeVar("Load", LatencyLoad, ThroughputLoad)
ROWS = ".jsonl"


def output_option() -> Option:
    """Where results are written to."""
    return option("--output", "-o", type=PATH, help="Write the results to this JSON file.")


@option_command("latency", {"Load": LatencyLoad} | ENGINE, output_option(), quiet_option(), foreign=LATENCY)
def latency(options: dict[str, Any], output: Path | None) -> None:
    """Latency of one batch at a time: TTFT, TPOT, ITL, tokens per second."""
    from quire.bench.offline import latency as measure

    _offline("latency", read_options(LatencyLoad, options), measure, options, output)


@option_command("throughput", {"Load": ThroughputLoad} | ENGINE, output_option(), quiet_option(), foreign=THROUGHPUT)
def throughput(options: dict[str, Any], output: Path | None) -> None:
    """Throughput of many requests at once, and how much of the KV cache is wasted."""
    from quire.bench.offline import throughput as measure

    _offline("throughput", read_options(ThroughputLoad, options), measure, options, output)


@option_command(
    "serve",
    {"Load": ServeLoad},
    option(
        "--output", "-o", type=PATH, help="Write the results to this JSON file, or append rows to this .jsonl file."
    ),
    quiet_option(),
    model_argument=False,
    foreign=SERVE,
)
def serve(options: dict[str, Any], output: Path | None) -> None:
    """Load on a running server over HTTP, streaming, with latencies as its clients see them.

    Prompts are random tokens, conversations (--turns) or those of a trace (--trace); they come by --arrivals, or are
    raised until the server no longer follows (--sweep).
    """
    load = read_options(ServeLoad, options)
    from quire.bench import serving
    from quire.bench.report import report
    from quire.bench.sending import on_loop
    from quire.bench.sweep import sweep
    from quire.figures.files import Appending

    rows = Appending(output) if output is not None and output.suffix == ROWS else None
    if load.sweep:

        def on_point(point: SweepPoint) -> None:
            print(_line(load.sweep, point), flush=True)
            _keep(rows, point.measured)

        results = on_loop(sweep(load, on_point)).results()
    else:
        measured = on_loop(serving.measure(load))
        _keep(rows, measured)
        results = measured.results()
    report("serve", msgspec.structs.replace(load, api_key=""), None, results, None if rows else output)
    if not results["rates"]["completed"]:
        raise click.exceptions.Exit(1)


def _keep(rows: Appending | None, measured: ServingResult) -> None:
    if rows is not None:
        rows.add(measured.row(_command(measured.load)))


def _line(kind: str, point: SweepPoint) -> str:
    return f"{kind} {point.at:.2f}: {point.answered:.2f} requests/s answered, {point.why or 'held'}"


def _command(load: ServeLoad) -> str:
    """Makes a measured row again, but for the key."""
    plain = msgspec.structs.replace(load, api_key="", sweep="")
    fields = msgspec.structs.fields(ServeLoad)
    given = {f.name: v for f in fields if (v := getattr(plain, f.name)) != f.default}
    return shlex.join(["quire", "bench", "serve", *to_arguments(given)])


def _offline(
    name: str,
    load: Load,
    measure: Callable[[LocalEngine, Load, int], dict[str, Any]],
    options: dict[str, Any],
    output: Path | None,
) -> None:
    """Measure an engine that is loaded for it, in this process."""
    from quire.bench.report import report
    from quire.core.progress import loading_bar
    from quire.engine.local import LocalEngine

    config = to_engine(options)
    with loading_bar() as progress:
        engine = LocalEngine(config, progress)
    report(name, load, facts(engine), measure(engine, load, config.model.seed), output)


def facts(engine: LocalEngine) -> dict[str, Any]:
    """What the engine was: its options and what it decided."""
    info = msgspec.to_builtins(engine.info)
    del info["folder"]
    return {"options": msgspec.to_builtins(engine.engine.config), "info": info}
