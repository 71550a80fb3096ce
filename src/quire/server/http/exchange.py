"""One request over HTTP and what came of it: what the access log and traces are made of; what of its body is kept."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from starlette.types import Scope

from quire.core.errors import Overloaded
from quire.core.request import Request
from quire.engine.frontend.request_times import Timings
from quire.server.http.dialects import OPENAI, Dialect
from quire.server.keys import NOBODY, Tenant
from quire.server.text_generation.reports import Usage


class Bodies:
    """Bodies of all requests together: `limit` bytes at most, but for one that is alone."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0


class Part:
    """Body of one request, until it says that it keeps no more of its body than fields."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._held = 0

    @property
    def size(self) -> int:
        """Bytes of it that are counted now."""
        return self._held

    def take(self, count: int) -> None:
        """Count bytes that were read. `Overloaded` where others hold too many."""
        others = self._bodies.held - self._held
        if others and self._bodies.held + count > self._bodies.limit:
            raise Overloaded(
                f"bodies of other requests take {others / 1e6:.0f} MB, and there is no room for this one "
                f"(--max-bodies-gb {self._bodies.limit / 1e9:g})"
            )
        self._held += count
        self._bodies.held += count

    def release(self) -> None:
        """What was read is no more."""
        self._bodies.held -= self._held
        self._held = 0


class Work(Protocol):
    """What the engine did for an exchange: answers that were generated, or vectors."""

    requests: Sequence[Request]

    def usage(self) -> Usage: ...

    def timings(self, request: Request | None = None) -> Timings: ...

    @property
    def finish_reasons(self) -> list[str | None]: ...

    def finish_reasons_of(self, request: Request) -> list[str | None]: ...


@dataclass(slots=True)
class Exchange:
    """`scope` is ASGI's; `arrived` is in seconds since 1970, `began` of `time.monotonic`.

    `status` 0: nothing was answered yet; 499: the client left. `generation` and the name of the `model` are set once
    the engine has the request. `body`: what of it is in memory. `background`: this is the work that an exchange left
    behind that was answered before; it is no request over HTTP of its own. `dialect`: how errors are said to its
    client; `operation`: what traces call it.
    """

    request_id: str
    scope: Scope
    arrived: float
    began: float
    tenant: Tenant = NOBODY
    status: int = 0
    seconds: float = 0.0
    generation: Work | None = None
    model: str = ""
    body: Part = field(default_factory=lambda: Part(Bodies(0)))
    background: bool = False
    dialect: Dialect = OPENAI
    operation: str | None = None

    def end(self) -> None:
        """The last byte was sent, or the client left."""
        self.seconds = time.monotonic() - self.began
        self.status = self.status or 499
        self.body.release()

    def left(self, work: Work, model: str) -> Exchange:
        """What goes on in the background when this one has been answered."""
        kept = ("type", "method", "path", "root_path", "raw_path", "headers", "client", "route")
        scope = {name: self.scope[name] for name in kept if name in self.scope}
        body = Part(Bodies(0))
        return replace(self, scope=scope, status=0, generation=work, model=model, body=body, background=True)

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
