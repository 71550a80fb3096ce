"""Start a server of one model or of several: reserve the port, load what is loaded first, serve until it is drained."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from quire.core.config import EngineConfig, ModelConfig
from quire.core.errors import ConfigError, QuireError
from quire.core.files import read_text
from quire.core.machine import raise_file_limit, share_heaps, uncollected
from quire.core.running import RunningServer, registered
from quire.core.version import VERSION
from quire.engine.client import EngineClient
from quire.engine.record.recorder import RecordingClient, make_folder
from quire.model.disk.tokenizer import tokenizer_folder
from quire.server.http.access_log import watchers
from quire.server.http.address import bind, leave, listen, where
from quire.server.keys import Keys
from quire.server.server_options import ServerOptions
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.server.models.entry import ModelEntry
    from quire.server.models.state import ModelServer

logger = logging.getLogger("quire.server")

FAILED_EXIT_CODE = 1  # the engine died, or a second signal cut requests off
SERVER = ("quire.server.models.start", "quire.server.draining")
SWITCH_SECONDS = 5e-4
"""What a thread that works keeps the interpreter for. At Python's 5 ms the event loop waits that long after each call
to the system beside a reader of many outputs: 5,000 streams took half as long again."""


def _check_tls(options: ServerOptions) -> None:
    if options.ssl_certfile is None:
        return
    for name in ("ssl_keyfile", "ssl_certfile"):
        if not Path(getattr(options, name)).is_file():
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: no such file", param=name)
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--ssl-certfile {options.ssl_certfile} and --ssl-keyfile {options.ssl_keyfile}: not a certificate and its "
            f"key, both in PEM: {error.strerror or error}",
            param="ssl_certfile",
        ) from None


def _check_files(options: ServerOptions) -> None:
    """Refuse keys that are not there, and traces that cannot be sent, before the model is loaded, which may take
    minutes."""
    Keys(options)
    for watcher in watchers(options):
        watcher.close()
    if options.record is not None:
        make_folder(Path(options.record))


def _check_texts(config: EngineConfig) -> None:
    """Refuse a template or tokenizer that is not there."""
    if config.model.chat_template is not None:
        read_text(Path(config.model.chat_template))
    if config.model.tokenizer is not None:
        tokenizer_folder(config.model, "")


def recorded(client: EngineClient, config: EngineConfig, options: ServerOptions) -> EngineClient:
    """The client, with a flight recorder around it where one was asked for."""
    if options.record is None:
        return client
    limit = options.record_mib << 20
    return RecordingClient(client, config, Path(options.record), prompts=options.record_prompts, limit=limit)


def prepare(options: ServerOptions) -> None:
    """What a process that serves does first. `ConfigError` for options that cannot work."""
    options.validate()
    sys.setswitchinterval(SWITCH_SECONDS)
    raise_file_limit()
    _check_tls(options)


def serve(config: EngineConfig, options: ServerOptions, start_engine: Callable[[EngineConfig], EngineClient]) -> int:
    """Serve one model until a signal; the exit code, 1 when the engine died. `start_engine` returns a client, its model
    loaded.

    Raises `ConfigError` for an address that cannot be had and whatever `start_engine` raises, before anything listens.
    The server is imported, and the model's tokenizer and templates are read, while the engine's process loads it.
    """
    share_heaps()
    prepare(options)
    _check_files(options)
    _check_texts(config)
    sock = bind(options)
    ahead = threading.Thread(target=_prepare_texts, args=(config.model,), daemon=True)
    ahead.start()
    try:
        client = recorded(start_engine(config), config, options)
    except BaseException:
        sock.close()
        raise
    try:
        ahead.join()
        from quire.server.http.metrics import HttpMetrics
        from quire.server.models.start import open_service, server_of_one

        with uncollected(forever=True):
            service = open_service(client, config, options, HttpMetrics())
            state = server_of_one(service)
        try:
            return _run(state, sock, client.info.served_name)
        finally:
            service.engine.close()
    finally:
        sock.close()
        leave(options)
        client.close()


def _prepare_texts(options: ModelConfig) -> None:
    """Import the server, read the tokenizer and check the templates; what is wrong with them `serve` tells.

    In this order: texts that are read between imports leave holes in the heap, 10 MB of them.
    """
    for module in SERVER:
        importlib.import_module(module)
    from quire.model.disk.checkpoint import EMBEDDED
    from quire.store.names import local_path
    from quire.text.template import ChatTemplate

    with suppress(QuireError):
        folder = tokenizer_folder(options, local_path(options.model) if options.model else EMBEDDED)
        if folder.exists():  # else the engine's process is to download it
            ChatTemplate.from_folder(folder, Tokenizer.read_ahead(folder), options.chat_template)


def serve_models(
    entries: Sequence[ModelEntry],
    options: ServerOptions,
    start_engine: Callable[[ExitStack, EngineConfig], EngineClient],
) -> int:
    """Serve several models, loaded when requests name them, until a signal; the exit code. No death of an engine ends
    the server.

    Raises `ConfigError` for an address that cannot be had, or for models that can never be loaded.
    """
    prepare(options)
    if options.record is not None:
        raise ConfigError("--record: recordings are of one model; serve it alone", param="record")
    for entry in entries:
        _check_texts(entry.config)
    from quire.server.models.start import server_of_several

    with uncollected(forever=True):
        state = server_of_several(entries, options, start_engine)
    sock = bind(options)
    try:
        return _run(state, sock, f"{len(entries)} models")
    finally:
        sock.close()
        leave(options)


def _run(state: ModelServer, sock: socket.socket, name: str) -> int:
    """Listen, and answer until the server is drained, or the engine that it was started with has died."""
    from quire.server.announce import announce
    from quire.server.draining import make_server

    with uncollected(forever=True):
        server = make_server(state)
    listen(sock, state.options)
    address = where(sock, state.options)
    logger.info("serving %s on %s", name, address)
    announce(state, address, server.paths)
    own = RunningServer(
        pid=os.getpid(),
        address=address,
        models=tuple(state.pool.models),
        started=time.time(),
        version=VERSION,
        patience=state.options.shutdown_timeout,
    )
    try:
        with registered(own), server.garbage.seldom():
            server.run(sockets=[sock])
    finally:
        state.close()
    return FAILED_EXIT_CODE if server.forced or state.engines.failure is not None else 0
