"""A live server over a real engine in this process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

from live_server import LiveServer
from quire.core.config import EngineConfig, flat_config
from quire.core.request import Request
from quire.engine.client import StepReport
from quire.engine.local import LocalEngine
from quire.server.server_options import ServerOptions
from stub_engine import StubEngine


class Shared(LocalEngine):
    """For the two threads of an `AsyncEngine`."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.lock = threading.Lock()

    def submit(self, request: Request) -> None:
        with self.lock:
            super().submit(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        with self.lock:
            super().abort(request_id, index)

    def poll(self, timeout: float) -> StepReport | None:
        with self.lock:
            report = super().poll(timeout)
        if report is None:
            time.sleep(0.001)
        return report


@contextlib.contextmanager
def real(**options: Any) -> Iterator[LiveServer]:
    """A running server of the embedded model, stopped at the end; `options` are its engine's."""
    config = flat_config(device="cpu", **options)
    server = LiveServer(cast(StubEngine, Shared(config)), ServerOptions(port=0), config)
    server.start()
    try:
        yield server
    finally:
        server.stop()
