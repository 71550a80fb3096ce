"""Run the server: reserve the port, load the engine, serve, drain."""

from __future__ import annotations

import contextlib
import logging
import resource
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, Unavailable
from quire.core.machine import uncollected
from quire.engine.client import EngineClient, EngineInfo
from quire.engine.edge.async_engine import AsyncEngine
from quire.engine.record.recorder import RecordingClient, make_folder
from quire.model.disk.tokenizer import model_tokenizer, tokenizer_folder
from quire.server.app import create_app
from quire.server.garbage import Garbage
from quire.server.http.address import BACKLOG, bind, leave, listen, where
from quire.server.http.connection import LimitedProtocol
from quire.server.http.door import Door
from quire.server.http.watchers import watchers
from quire.server.keys import Keys
from quire.server.options import ServerOptions
from quire.text.files import read_text
from quire.text.render import RENDERER
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

logger = logging.getLogger("quire.server")

FAILED_EXIT_CODE = 1  # the engine died, or a second signal cut requests off
SWITCH_SECONDS = 5e-4
"""What a thread that works keeps the interpreter for. At Python's 5 ms the event loop waits that long after each call
to the system beside a reader of many outputs: 5,000 streams took half as long again."""
LAST_WORDS_SECONDS = 2  # for the errors of requests that were not finished


class DrainingServer(uvicorn.Server):
    """On the first signal new requests are refused (503) while those in flight finish; a second signal ends it now.

    SIGHUP reads the file of keys again, where there is one. Otherwise, as when a terminal goes away, it is a first
    signal and never a second one: shells and systemd send it beside others. Where it is ignored (nohup) it stays so.
    SIGUSR1 starts the engines anew, one after the other, and no request is lost.
    When the engine has died, it ends as soon as the requests in flight have their errors: a supervisor starts it anew.
    """

    def __init__(self, config: uvicorn.Config, service: Door) -> None:
        super().__init__(config)
        self.service = service
        self._deadline = 0.0
        self.garbage = Garbage()
        self.forced = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals meanwhile."""
        before = signal.getsignal(signal.SIGHUP)
        taken = {signal.SIGUSR1: self.handle_restart, signal.SIGHUP: self.handle_exit}
        if before is signal.SIG_IGN:
            del taken[signal.SIGHUP]
        if threading.current_thread() is not threading.main_thread():
            taken.clear()
        with super().capture_signals():
            earlier = {sig: signal.signal(sig, handler) for sig, handler in taken.items()}
            try:
                yield
            finally:
                for sig, handler in earlier.items():
                    signal.signal(sig, handler)

    def handle_restart(self, sig: int, frame: FrameType | None) -> None:
        """Ask for the engines to be started anew; a server that drains has no use for that."""
        if self.service.draining:
            logger.warning("%s: nothing is started anew while requests are drained", signal.Signals(sig).name)
        else:
            logger.info("%s: the engines are started anew, one after the other", signal.Signals(sig).name)
            self.service.engine.restart()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal arrived. It is not raised again after the drain (uvicorn does), so the exit code is ours."""
        if sig == signal.SIGHUP and self.service.keys.from_file:
            self.service.keys.reload()
            return
        if self.service.draining and sig == signal.SIGHUP:
            return
        if self.service.draining:
            self.force_exit = self.forced  # the third signal does not even wait for the clients to be told
            self.forced = True
            return
        self.service.draining = True
        self._deadline = time.monotonic() + self.service.options.shutdown_timeout
        name, active = signal.Signals(sig).name, self.service.active
        logger.info("%s: draining %d requests; a second signal ends them at once", name, active)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """A third signal, too, lets the application's own task end: cancelled, it would leave a traceback."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; True ends the server."""
        service = self.service
        self.garbage.look(idle=service.active == 0)
        if service.engine.failure is not None or (service.draining and service.active == 0):
            return True
        if service.draining and (self.forced or time.monotonic() >= self._deadline):
            logger.warning("%d requests are cut off", service.active)
            service.engine.fail_all(Unavailable("the server is shutting down and stopped waiting"))
            return True
        return await super().on_tick(counter)


def uvicorn_config(app: FastAPI, options: ServerOptions) -> uvicorn.Config:
    """uvicorn with our protocol; limits are its class attributes because uvicorn constructs it."""
    limits = {"header_timeout": options.header_timeout, "write_timeout": options.write_timeout}
    return uvicorn.Config(
        app,
        http=type("Protocol", (LimitedProtocol,), limits),
        ws="none",
        loop="uvloop",
        lifespan="on",
        log_config=None,
        access_log=False,  # ours is told more (quire.server.http.access)
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=options.keep_alive_timeout,  # type: ignore[arg-type]  # fractions of seconds count too
        timeout_graceful_shutdown=LAST_WORDS_SECONDS,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        root_path=options.root_path,
    )


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


def check_texts(config: EngineConfig) -> None:
    """The same of a template or tokenizer that is not there."""
    if config.model.chat_template is not None:
        read_text(Path(config.model.chat_template))
    if config.model.tokenizer is not None:
        tokenizer_folder(config.model, "")


def _raise_file_limit() -> None:
    """Open as many files as the system lets this process: the soft limit is often 1024, and a connection is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # macOS has a lower limit of its own
        logger.warning("at most %d files can be open, connections among them: %s", soft, error)


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
    _raise_file_limit()
    _check_tls(options)


def serve(config: EngineConfig, options: ServerOptions, start_engine: Callable[[EngineConfig], EngineClient]) -> int:
    """Serve until a signal; the exit code, 1 when the engine died. `start_engine` returns a client, its model loaded.

    Raises `ConfigError` for an address that cannot be had and whatever `start_engine` raises, before anything listens.
    """
    prepare(options)
    _check_files(options)
    check_texts(config)
    sock = bind(options)
    try:
        client = recorded(start_engine(config), config, options)
    except BaseException:
        sock.close()
        raise
    try:
        return _serve(config, options, client, sock)
    finally:
        sock.close()
        leave(options)
        client.close()


def _serve(config: EngineConfig, options: ServerOptions, client: EngineClient, sock: socket.socket) -> int:
    with uncollected(forever=True):
        engine, server = _make(config, options, client)
    listen(sock, options)
    logger.info("serving %s on %s", client.info.served_name, where(sock, options))
    try:
        with server.garbage.seldom():
            server.run(sockets=[sock])
    finally:
        engine.close()
        server.service.close()
    return FAILED_EXIT_CODE if server.forced or engine.failure is not None else 0


def text_tools(config: EngineConfig, info: EngineInfo) -> tuple[Tokenizer, ChatTemplate | None]:
    """The tokenizer and the template of a model that is loaded."""
    folder = tokenizer_folder(config.model, info.folder)
    tokenizer = model_tokenizer(config.model, info.folder, info.vocab_size)
    template = ChatTemplate.from_folder(folder, tokenizer, config.model.chat_template, info.max_model_len)
    RENDERER.rest()  # a server of completions alone has no use for its process
    return tokenizer, template


def make_app(config: EngineConfig, options: ServerOptions, client: EngineClient) -> tuple[AsyncEngine, FastAPI]:
    """The application over an engine, with the tokenizer and template of its model; the caller closes the engine."""
    tokenizer, template = text_tools(config, client.info)
    engine = AsyncEngine(client)
    return engine, create_app(engine, tokenizer, template, options, config)


def _make(config: EngineConfig, options: ServerOptions, client: EngineClient) -> tuple[AsyncEngine, DrainingServer]:
    engine, app = make_app(config, options, client)
    return engine, DrainingServer(uvicorn_config(app, options), app.state.service)
