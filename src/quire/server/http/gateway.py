"""What every request passes before a route sees it: limits, Host, key, draining; and what every response gets.

What came of a request is an `Exchange`, which the metrics and the watchers of the server see at its end.
"""

from __future__ import annotations

import logging
import re
import time
from typing import Protocol

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.core.errors import BadRequest, QuireError, Unavailable, is_panic
from quire.core.request import random_id
from quire.engine.frontend.streams import CallQueue
from quire.server.http.activity import Activity
from quire.server.http.body import IgnoredFields, ignored_warning, warning
from quire.server.http.dialects import Dialect
from quire.server.http.disconnect import ClientGone
from quire.server.http.errors import HttpError, error_headers
from quire.server.http.exchange import Bodies, Exchange, Part
from quire.server.http.history import History
from quire.server.http.routes import RouteTable, route_path, with_one_root
from quire.server.keys import NOBODY, Keys
from quire.server.server_options import ServerOptions


class Engines(Protocol):
    """One engine, or all of them."""

    turns: CallQueue

    @property
    def failure(self) -> QuireError | None: ...

    def check_room(self) -> None: ...

    def restart(self) -> None: ...

    def fail_all(self, error: QuireError) -> None: ...


class ServerState(Protocol):
    """The state of a server, as far as it is no model's: `models.state.ModelServer`.

    `active` counts requests being served, `draining` is set by the first SIGTERM.
    """

    draining: bool
    active: int
    created: int
    keys: Keys
    activity: Activity
    history: History

    @property
    def engines(self) -> Engines: ...

    @property
    def options(self) -> ServerOptions: ...

    @property
    def registries(self) -> list[CollectorRegistry]: ...

    def ended(self, exchange: Exchange) -> None: ...

    def close(self) -> None: ...


logger = logging.getLogger("quire.server")

MAX_HEADER_BYTES = 16 << 10
MAX_HEADERS = 64
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")

_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


class Gateway:
    """Pure ASGI, so that streams pass through untouched.

    A route finds in `request.state.tenant` whose key was sent; its salt parts the prefix cache, as the time and
    `cached_tokens` of a hit would confirm a guess at another's prompt. In `request.state.ignored` it notes fields
    of the body that mean nothing here, in `warnings` what else a client is to know of its answer: the response's
    `Warning` headers say both.
    """

    def __init__(
        self, app: ASGIApp, server: ServerState, table: RouteTable, pages: frozenset[str] = frozenset()
    ) -> None:
        """`pages`: further paths that may be read without a key."""
        self._app = app
        self._server = server
        self._table = table
        self._keyless = {"public"} if server.options.protect_metrics else {"public", "monitoring"}
        self._pages = pages
        self._ignored = IgnoredFields()
        self._bodies = Bodies(round(server.options.max_bodies_gb * 1e9))
        hosts = server.options.allowed_hosts
        if not hosts and server.options.host in ("localhost", "127.0.0.1", "::1"):
            hosts = LOOPBACK
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = with_one_root(scope)
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # uvicorn, which has the other scope, leaves the body out
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        body = Part(self._bodies)
        routes = self._table.at(path := route_path(scope))
        exchange = Exchange(_request_id(headers), scope, time.time(), time.monotonic(), body=body)
        exchange.dialect = self._table.dialect(path)
        exchange.operation = next((route.operation for route in routes if route.method == scope["method"]), None)
        ignored, warnings = list[str](), list[str]()

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                named = (b"x-request-id", exchange.request_id.encode())
                message = {**message, "headers": [*message["headers"], named]}
                if self._server.draining:
                    message["headers"].append((b"connection", b"close"))
                if ignored:
                    message["headers"].append((b"warning", ignored_warning(ignored)))
                message["headers"].extend((b"warning", warning(text)) for text in warnings)
            await send(message)

        counted = scope["method"] == "POST"
        self._server.active += counted
        try:
            self._check(exchange, path, headers)
            if counted:
                await self._server.engines.turns.mine()
            own = {"tenant": exchange.tenant, "exchange": exchange, "ignored": ignored, "warnings": warnings}
            exchange.scope = {**scope, "state": {**scope.get("state", {}), **own}}  # the router adds its route to it
            await self._app(exchange.scope, receive, reply)
        except ClientGone:
            exchange.status = 499
        except QuireError as error:
            if not exchange.status:
                await send_error(reply, error, exchange.dialect)
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            logger.exception("request %s failed", exchange.request_id)
            if not exchange.status:
                failed = QuireError(f"internal error in request {exchange.request_id}")
                await send_error(reply, failed, exchange.dialect)
        finally:
            self._server.active -= counted
            exchange.end()
            if ignored and exchange.operation is not None:
                self._ignored.note(ignored, path)
            self._server.ended(exchange)
            exchange.scope = scope  # that of the application refers to the exchange

    def _check(self, exchange: Exchange, path: str, headers: list[tuple[bytes, bytes]]) -> None:
        """Find the tenant; raises for a request that must not reach a route, whose body has not been read."""
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            raise HttpError(431, "the request's headers are too large", code="headers_too_large")
        if sum(name == b"host" for name, _ in headers) > 1:
            raise BadRequest("host: the header is given twice, and which of them counts is not known", param="host")
        if self._hosts and _host(headers) not in self._hosts:
            raise HttpError(421, "host: this server does not answer to that name", code="misdirected_request")
        keys = self._server.keys
        routes = self._table.at(path)
        opened = any(r.access in self._keyless for r in routes) or (exchange.method == "GET" and path in self._pages)
        tenant = keys.tenant(headers) if keys.needed and not opened else NOBODY
        if tenant is None:
            raise HttpError(
                401, "a valid key is needed: Authorization: Bearer <key>, or x-api-key: <key>", code="invalid_api_key"
            )
        exchange.tenant = tenant
        if self._server.draining and exchange.method == "POST":
            raise Unavailable("the server is shutting down; send the request again in a moment")
        if exchange.method == "POST":
            keys.spend(tenant)
            if any(route.generates for route in routes):
                self._server.engines.check_room()


async def send_error(send: Send, error: QuireError, dialect: Dialect) -> None:
    """An error as a whole response, as clients read it who know that dialect."""
    body = dialect.error(error) + b"\n"
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": [*headers, *error_headers(error)]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _request_id(headers: list[tuple[bytes, bytes]]) -> str:
    """The client's X-Request-Id if it is harmless to repeat, else a new one."""
    given = next((value for name, value in headers if name == b"x-request-id"), b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else random_id()


def _host(headers: list[tuple[bytes, bytes]]) -> str:
    value = next((value for name, value in headers if name == b"host"), b"").decode("latin-1").lower()
    return re.sub(r":\d*$", "", value)
