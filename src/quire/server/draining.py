"""The server that drains: what is asked while it ends is refused, and what was asked before is finished."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from quire.core.errors import Unavailable
from quire.core.machine import trim_heap
from quire.server.app import create_app
from quire.server.http.address import BACKLOG
from quire.server.http.connection import LimitedProtocol
from quire.server.http.gateway import ServerState
from quire.server.models.state import ModelServer
from quire.server.server_options import ServerOptions

SEARCH_SHARE = 0.01
"""Of the time, at most, while requests are served."""
NEW_OBJECTS = 700
"""Objects that are worth a search, as the interpreter has it."""
TRIM_EVERY = 2.0
"""Seconds between two times that freed memory is given back."""


class Garbage:
    """Searches at moments of its own, which stop everything, in place of the interpreter's.

    That looks at young objects all the time, and at all as soon as a quarter of them is new. With what was loaded left
    out (`uncollected`) it stopped 5,000 streams for 0.45 s with each of their tokens, and 50 ms many times between;
    probes waited as long. There is little to find: requests leave no circles (tests/server/test_garbage_collection.py).
    """

    def __init__(self) -> None:
        self._next, self._next_trim, self._on, self._served = 0.0, 0.0, False, False

    @contextmanager
    def seldom(self) -> Iterator[None]:
        """Meanwhile there are no searches but those of `look`."""
        was, self._on = gc.isenabled(), True
        gc.disable()
        try:
            yield
        finally:
            self._on = False
            if was:
                gc.enable()

    def look(self, idle: bool) -> None:
        """Search if there may be something to find, and either it is time or nobody is disturbed.

        What large bodies leave goes back to the system when nobody is disturbed: the C library keeps it, 22 MiB after
        15 minutes of bodies of up to 500 KB.
        """
        began = time.monotonic()
        if self._on and gc.get_count()[0] >= NEW_OBJECTS and (began >= self._next or idle):
            self._served = True
            gc.collect()
            now = time.monotonic()
            self._next = now + (now - began) / SEARCH_SHARE
        self._served |= not idle
        if self._on and idle and self._served and began >= self._next_trim:
            self._served, self._next_trim = False, began + TRIM_EVERY
            trim_heap()


logger = logging.getLogger("quire.server")

LAST_WORDS_SECONDS = 2  # for the errors of requests that were not finished


class DrainingServer(uvicorn.Server):
    """Server that refuses new requests (503) from the first signal while others finish; a second signal ends it.

    SIGHUP reads the file of keys again, where there is one. Otherwise, as when a terminal goes away, it is a first
    signal and never a second one: shells and systemd send it beside others. Where it is ignored (nohup) it stays so.
    SIGUSR1 starts the engines anew, one after the other, and no request is lost.
    When the engine has died, it ends as soon as the requests in flight have their errors: a supervisor starts it anew.
    """

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self.state = state
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

    @property
    def paths(self) -> frozenset[str]:
        """Paths of the application's routes and pages."""
        app = self.config.app
        assert isinstance(app, Starlette)
        return frozenset(str(path) for route in app.routes if (path := getattr(route, "path", None)) is not None)

    def handle_restart(self, sig: int, frame: FrameType | None) -> None:
        """Ask for the engines to be started anew; a server that drains has no use for that."""
        if self.state.draining:
            logger.warning("%s: nothing is started anew while requests are drained", signal.Signals(sig).name)
        else:
            logger.info("%s: the engines are started anew, one after the other", signal.Signals(sig).name)
            self.state.engines.restart()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal arrived. It is not raised again after the drain (uvicorn does), so the exit code is ours."""
        if sig == signal.SIGHUP and self.state.keys.from_file:
            self.state.keys.reload()
            return
        if self.state.draining and sig == signal.SIGHUP:
            return
        if self.state.draining:
            self.force_exit = self.forced  # the third signal does not even wait for the clients to be told
            self.forced = True
            return
        self.state.draining = True
        self._deadline = time.monotonic() + self.state.options.shutdown_timeout
        name, active = signal.Signals(sig).name, self.state.active
        logger.info("%s: draining %d requests; a second signal ends them at once", name, active)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """A third signal, too, lets the application's own task end: cancelled, it would leave a traceback."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; True ends the server."""
        state = self.state
        self.garbage.look(idle=state.active == 0)
        if state.engines.failure is not None or (state.draining and state.active == 0):
            return True
        if state.draining and (self.forced or time.monotonic() >= self._deadline):
            logger.warning("%d requests are cut off", state.active)
            state.engines.fail_all(Unavailable("the server is shutting down and stopped waiting"))
            return True
        return await super().on_tick(counter)


def uvicorn_config(app: Starlette, options: ServerOptions) -> uvicorn.Config:
    """uvicorn with our protocol; limits are its class attributes because uvicorn constructs it."""
    limits = {"header_timeout": options.header_timeout, "write_timeout": options.write_timeout}
    return uvicorn.Config(
        app,
        http=type("Protocol", (LimitedProtocol,), limits),
        ws="none",
        loop="uvloop",
        lifespan="on",
        log_config=None,
        access_log=False,  # ours is told more (quire.server.http.access_log)
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=options.keep_alive_timeout,  # type: ignore[arg-type]  # fractions of seconds count too
        timeout_graceful_shutdown=LAST_WORDS_SECONDS,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        root_path=options.root_path,
    )


def make_server(state: ModelServer) -> DrainingServer:
    """Make the application and the server that answers by it."""
    return DrainingServer(uvicorn_config(create_app(state), state.options), state)
