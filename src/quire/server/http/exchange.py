"""One request over HTTP and what came of it: what metrics of HTTP, the access log and traces are made of."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import Scope

from quire.core.request import Request
from quire.engine.edge.account import Timings
from quire.server.api.replies import Usage
from quire.server.http.body import Bodies, Part
from quire.server.keys import NOBODY, Tenant


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
    behind that was answered before; it is no request over HTTP of its own.
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


BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0),
)


class HttpMetrics:
    """Counted by route: `handler` is a registered path, never what the client sent. A stream ends with its last byte.

    `http_requests` has statuses as 2xx, 4xx, as that tool does; `quire:http_responses` tells 400 and 429 apart.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        text = "Seconds from a request's headers to the end of its response."
        labels = ["handler", "method"]
        self._seconds = Histogram("http_request_duration_seconds", text, labels, buckets=BUCKETS, registry=registry)
        labels = ["handler", "method", "status"]
        self._requests = Counter("http_requests", "Requests over HTTP.", labels, registry=registry)
        self._responses = Counter("quire:http_responses", "HTTP responses.", ["route", "status"], registry=registry)

        text = "Answers that are not all that their JSON schema asks for, of which a grammar could not hold some."
        self._invalid = Counter("quire:answers_with_schema_errors", text, registry=registry)

    def checked(self, invalid: int) -> None:
        """Answers were checked, of which so many are invalid."""
        self._invalid.inc(invalid)

    def ended(self, handler: str, method: str, status: int, seconds: float) -> None:
        """A request was answered, or its client left (499)."""
        self._seconds.labels(handler, method).observe(seconds)
        self._requests.labels(handler, method, f"{status // 100}xx").inc()
        self._responses.labels(handler, str(status)).inc()
