"""Serve several models: one port, an engine process for each that is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.machine import uncollected
from quire.engine.client import EngineClient
from quire.server.api.responses import Responses
from quire.server.app import cors
from quire.server.http.address import bind, leave, listen, where
from quire.server.http.middleware import Gateway
from quire.server.options import ServerOptions
from quire.server.run import FAILED_EXIT_CODE, DrainingServer, make_app, prepare, uvicorn_config
from quire.server.several.front import Front, LoadedModel, Several
from quire.server.several.pool import Listed, Pool

logger = logging.getLogger("quire.server")

StartEngine = Callable[[ExitStack, EngineConfig], EngineClient]
"""Loads a model; what goes on the stack is closed after its engine."""


def load_model(options: ServerOptions, start_engine: StartEngine, responses: Responses, listed: Listed) -> LoadedModel:
    """A model with an application of its own; raises what `start_engine` does. `responses`: those of all models."""
    with ExitStack() as stack:
        client = start_engine(stack, listed.config)
        stack.callback(client.close)
        _, app = make_app(listed.config, options, client, behind=True)
        app.state.responses = responses
        return LoadedModel(app, app.state.service, stack.pop_all().close)


def make_several(
    models: Sequence[Listed], options: ServerOptions, start_engine: StartEngine
) -> tuple[Several, ASGIApp]:
    """The state of the server and its application; `ConfigError` for models that can never be loaded."""
    budget = round(options.models_memory_gb * 1e9)
    pool = Pool(models, partial(load_model, options, start_engine, Responses()), budget, options.models_wait)
    several = Several(pool, options)
    front = Front(several)
    app: ASGIApp = Gateway(front, several, front.public)
    if options.allowed_origins:
        app = CORSMiddleware(app, **cors(options))
    return several, app


def serve_several(models: Sequence[Listed], options: ServerOptions, start_engine: StartEngine) -> int:
    """Serve until a signal; the exit code. No death of an engine ends the server.

    Raises `ConfigError` for an address that cannot be had, or for models that can never be loaded.
    """
    prepare(options)
    if options.record is not None:
        raise ConfigError("--record: recordings are of one model; serve it alone", param="record")
    several, app = make_several(models, options, start_engine)
    sock = bind(options)
    try:
        with uncollected(forever=True):
            server = DrainingServer(uvicorn_config(app, options), several)
        listen(sock, options)
        logger.info("serving %d models on %s", len(models), where(sock, options))
        with server.garbage.seldom():
            server.run(sockets=[sock])
    finally:
        sock.close()
        leave(options)
        several.close()
    return FAILED_EXIT_CODE if server.forced else 0
