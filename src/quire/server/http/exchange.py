"""One request over HTTP and what came of it: what the access log and traces are made of."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from starlette.types import Scope

from quire.server.generation import Generated
from quire.server.http.bodies import Bodies, Part
from quire.server.keys import NOBODY, Tenant


@dataclass(slots=True)
class Exchange:
    """`scope` is ASGI's; `arrived` is in seconds since 1970, `began` of `time.monotonic`.

    `status` 0: nothing was answered yet; 499: the client left. `generation` and the name of the `model` are set once
    the engine has the request. `body`: what of it is in memory.
    """

    request_id: str
    scope: Scope
    arrived: float
    began: float
    tenant: Tenant = NOBODY
    status: int = 0
    seconds: float = 0.0
    generation: Generated | None = None
    model: str = ""
    body: Part = field(default_factory=lambda: Part(Bodies(0)))

    def end(self) -> None:
        """The last byte was sent, or the client left."""
        self.seconds = time.monotonic() - self.began
        self.status = self.status or 499
        self.body.release()

    @property
    def route(self) -> str:
        """The registered path, never what the client sent."""
        return getattr(self.scope.get("route"), "path", "unmatched")

    @property
    def method(self) -> str:
        """GET, POST ..."""
        return str(self.scope["method"])

    @property
    def client(self) -> str:
        """Address and port of the other end; "" on a Unix socket."""
        client = self.scope.get("client")
        return f"{client[0]}:{client[1]}" if client else ""


class Watcher(Protocol):
    """Who is shown every exchange at its end, on the event loop: it must not wait."""

    def see(self, exchange: Exchange) -> None:
        """An exchange has ended."""

    def close(self) -> None:
        """The server ends."""
