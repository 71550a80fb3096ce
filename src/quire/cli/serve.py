"""`quire serve`: the OpenAI-compatible HTTP server."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.config_file import with_config
from quire.cli.flags import ENGINE, SERVER, to_engine, to_server, with_flags

if TYPE_CHECKING:
    from quire.core.config import EngineConfig
    from quire.engine.client import EngineClient, EngineInfo
    from quire.server.options import ServerOptions

logger = logging.getLogger("quire.cli")


@with_flags(ENGINE | SERVER)
def serve(
    options: dict[str, Any],
    config_file: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="FILE",
            rich_help_panel="Server",
            help="TOML file of flags by their long names; those of the command line win.",
        ),
    ] = None,
) -> None:
    """Serve a model over HTTP with OpenAI's API. Ctrl-C, SIGTERM or SIGHUP drains it."""
    options = with_config(config_file, options)
    config, server = to_engine(options), to_server(options)
    level = server.log_level.upper()
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # its name for everything, as "Started" too
    from quire.server import run

    # Until the server has its own handler: leave through `finally`, so that the engine process is stopped.
    for sig in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(sig) is not signal.SIG_IGN:
            signal.signal(sig, lambda number, _: sys.exit(128 + number))
    code = run.serve(config, server, partial(_start, server))
    raise typer.Exit(code)


def _start(server: ServerOptions, config: EngineConfig) -> EngineClient:
    """An engine that is started again, with the same limits, when it dies."""
    from msgspec.structs import replace

    from quire.core.machine import memory_file
    from quire.engine.process import ProcessEngine
    from quire.engine.progress import loading_bar
    from quire.engine.replicas import ReplicatedEngine
    from quire.engine.supervised import Patience, SupervisedEngine

    shards = memory_file() if config.offload.fully_shard else None

    def start(before: EngineInfo | None, given_up: Callable[[], bool]) -> ProcessEngine:
        if before is None:
            with loading_bar() as progress:
                return ProcessEngine(config, progress, shards=shards)
        model = replace(config.model, max_model_len=before.max_model_len)
        cache = replace(config.cache, num_blocks=before.num_blocks)
        return ProcessEngine(replace(config, model=model, cache=cache), None, given_up, shards)

    patience = Patience(
        hang=server.watchdog_timeout, deaths=server.max_engine_deaths, window=server.engine_deaths_window
    )
    count = config.parallel.data_parallel_size
    if count == 1:
        engine: EngineClient = SupervisedEngine(start, patience, config.scheduler)
    else:
        engine = ReplicatedEngine(count, lambda i, died: SupervisedEngine(start, patience, config.scheduler, died))
    info = engine.info
    logger.info(
        "loaded %s in %.1f s: %.1f MB of %s weights (quantization %s), %d KV blocks of %d tokens, %s/%s, %d threads",
        info.model,
        info.load_seconds,
        info.weight_bytes / 1e6,
        info.dtype,
        info.quantization,
        info.num_blocks,
        info.block_size,
        info.backend,
        info.isa,
        info.threads,
    )
    return engine
