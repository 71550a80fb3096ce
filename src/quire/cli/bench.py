"""`quire bench`: latency, throughput and load on a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from quire.bench.loads import LatencyLoad, ServeLoad, ThroughputLoad
from quire.cli.flags import ENGINE, pick, to_engine, with_flags
from quire.cli.suite import COMMANDS

if TYPE_CHECKING:
    from quire.core.config import EngineConfig
    from quire.engine.local import LocalEngine

Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the results to this JSON file.")]

bench = typer.Typer(help="Measure latency, throughput, or a server under load.", no_args_is_help=True)
for name, command in COMMANDS.items():
    bench.command(name)(command)


@bench.command()
@with_flags({"Load": LatencyLoad} | ENGINE)
def latency(options: dict[str, Any], output: Output = None) -> None:
    """Latency of one batch at a time: TTFT, TPOT, ITL, tokens per second."""
    load, config = pick(options, LatencyLoad), to_engine(options)
    engine = _engine(config)
    from quire.bench import offline
    from quire.bench.report import report

    report("latency", load, facts(engine), offline.latency(engine, load, config.model.seed), output)


@bench.command()
@with_flags({"Load": ThroughputLoad} | ENGINE)
def throughput(options: dict[str, Any], output: Output = None) -> None:
    """Throughput of many requests at once, and how much of the KV cache is wasted."""
    load, config = pick(options, ThroughputLoad), to_engine(options)
    engine = _engine(config)
    from quire.bench import offline
    from quire.bench.report import report

    report("throughput", load, facts(engine), offline.throughput(engine, load, config.model.seed), output)


@bench.command()
@with_flags({"Load": ServeLoad}, model_argument=False)
def serve(options: dict[str, Any], output: Output = None) -> None:
    """Load on a running server over HTTP, streaming, with latencies as its clients see them."""
    load = pick(options, ServeLoad)
    import asyncio

    from quire.bench import serving
    from quire.bench.report import report

    results = asyncio.run(serving.run(load))
    report("serve", msgspec.structs.replace(load, api_key=""), None, results, output)
    if not results["rates"]["completed"]:
        raise typer.Exit(1)


def _engine(config: EngineConfig) -> LocalEngine:
    from quire.engine.life.progress import loading_bar
    from quire.engine.local import LocalEngine

    with loading_bar() as progress:
        return LocalEngine(config, progress)


def facts(engine: LocalEngine) -> dict[str, Any]:
    """What the engine was: its options and what it decided."""
    info = msgspec.to_builtins(engine.info)
    del info["folder"]
    return {"options": msgspec.to_builtins(engine.engine.config), "info": info}
