"""`quire serve`: the OpenAI-compatible HTTP server."""

from __future__ import annotations

import logging
import signal
import sys
from typing import TYPE_CHECKING, Any

import typer

from quire.cli.flags import ENGINE, SERVER, to_engine, to_server, with_flags

if TYPE_CHECKING:
    from quire.core.config import EngineConfig
    from quire.engine.client import EngineClient

logger = logging.getLogger("quire.cli")


@with_flags(ENGINE | SERVER)
def serve(options: dict[str, Any]) -> None:
    """Serve a model over HTTP with OpenAI's API. Ctrl-C or SIGTERM drains it."""
    config, server = to_engine(options), to_server(options)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # its name for everything, as "Started" too
    from quire.server import run

    # Until the server has its own handler: leave through `finally`, so that the engine process is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    code = run.serve(config, server, _start)
    raise typer.Exit(code)


def _start(config: EngineConfig) -> EngineClient:
    from quire.engine.process import ProcessEngine
    from quire.engine.progress import loading_bar

    with loading_bar() as progress:
        engine = ProcessEngine(config, progress)
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
