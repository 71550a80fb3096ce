"""Serve several models: one port, an engine process for each that is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import msgspec
from starlette.applications import Starlette

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.machine import uncollected
from quire.engine.client import EngineClient
from quire.engine.frontend.async_engine import AsyncEngine
from quire.server.draining import DrainingServer, text_tools, uvicorn_config
from quire.server.http.address import bind, leave, listen, where
from quire.server.options import ServerOptions
from quire.server.run import FAILED_EXIT_CODE, check_texts, prepare
from quire.server.service import Service
from quire.server.several.front import make_front
from quire.server.several.pool import Listed, Pool
from quire.server.several.state import LoadedModel, Several

logger = logging.getLogger("quire.server")

StartEngine = Callable[[ExitStack, EngineConfig], EngineClient]
"""Loads a model; what goes on the stack is closed after its engine, or while it is loading to have it given up."""


def load_model(options: ServerOptions, start_engine: StartEngine, listed: Listed, until: ExitStack) -> LoadedModel:
    """A model with a service of its own; raises what `start_engine` does."""
    client = start_engine(until, listed.config)
    until.callback(client.close)
    tokenizer, template = text_tools(listed.config, client.info)
    # Keys are asked for before the model of a request is known.
    options = msgspec.structs.replace(options, api_key=(), api_keys_file=None, **listed.speech)
    service = Service(AsyncEngine(client), tokenizer, template, options, listed.config)
    return LoadedModel(service, until)


def make_several(
    models: Sequence[Listed], options: ServerOptions, start_engine: StartEngine
) -> tuple[Several, Starlette]:
    """The state of the server and its application; `ConfigError` for models that can never be loaded."""
    budget = round(options.models_memory_gb * 1e9)
    pool = Pool(models, partial(load_model, options, start_engine), budget, options.models_wait)
    several = Several(pool, options)
    return several, make_front(several)


def serve_several(models: Sequence[Listed], options: ServerOptions, start_engine: StartEngine) -> int:
    """Serve until a signal; the exit code. No death of an engine ends the server.

    Raises `ConfigError` for an address that cannot be had, or for models that can never be loaded.
    """
    prepare(options)
    if options.record is not None:
        raise ConfigError("--record: recordings are of one model; serve it alone", param="record")
    for listed in models:
        check_texts(listed.config)
    with uncollected(forever=True):
        several, app = make_several(models, options, start_engine)
    sock = bind(options)
    try:
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
