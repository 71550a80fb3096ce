"""The ASGI application: routes, error handlers and the gateway around them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.routing import Route as Endpoint

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, QuireError
from quire.engine.frontend.async_engine import AsyncEngine
from quire.server.apis.openai.responses import Responses
from quire.server.http.access_log import watchers
from quire.server.http.errors import HttpError, error_headers
from quire.server.http.gateway import Gateway, ServerState
from quire.server.http.routes import Route, RouteTable, route_path
from quire.server.openapi import openapi_endpoint
from quire.server.pages import live_pages, pages
from quire.server.routes import TABLE
from quire.server.server_options import ServerOptions
from quire.server.service import VERSION, Service
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

Call = Callable[[Route, Request], Awaitable[Response]]
"""Answers a request by a route: calls its handler with the server's state, or with a model's."""


def create_app(
    engine: AsyncEngine,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    options: ServerOptions,
    config: EngineConfig | None = None,
) -> Starlette:
    """The application of one model; `app.state.service` is its `Service`. The caller closes the engine.

    `config`: what the engine was told.
    """
    options.validate()
    service = Service(engine, tokenizer, template, options, config or EngineConfig(), watchers=watchers(options))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.start()
        yield

    return assemble(service, TABLE, lambda route, request: route.handler(service, request), lifespan)


def assemble(
    server: ServerState,
    table: RouteTable,
    call: Call,
    lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]],
) -> Starlette:
    """An application of the routes of `table` with the gateway and the pages before them.

    `app.state.service` is the `server`.
    """
    options = server.options

    @asynccontextmanager
    async def running(app: Starlette) -> AsyncIterator[None]:
        with server.activity.captured_logs():
            async with lifespan(app):
                kept = asyncio.create_task(server.history.keep(lambda: server.registries))
                try:
                    yield
                finally:
                    kept.cancel()

    app = Starlette(lifespan=running)
    app.state.service, app.state.responses = server, Responses()
    shown = [*live_pages(), *(pages() if options.playground else [])]
    app.add_middleware(Gateway, service=server, table=table, pages=frozenset(page.path for page in shown))
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=options.allowed_origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=["x-request-id"],
        )  # fmt: skip
    app.add_exception_handler(QuireError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    for route in table.routes:
        if options.root_path and route.path.startswith(f"{options.root_path}/"):
            told = "is the beginning of a path of the server's own, as"
            raise ConfigError(f"--root-path {options.root_path} {told} {route.path}; choose another", param="root_path")
    own = (Endpoint(route.path, _endpoint(route, call), methods=[route.method]) for route in table.routes)
    app.routes.extend([openapi_endpoint(VERSION, table.routes, options.strict), *own, *shown])
    return app


def _endpoint(route: Route, call: Call) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await call(route, request)

    return endpoint


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, QuireError)
    body = request.state.exchange.dialect.error(error)
    response = Response(body, error.status, media_type="application/json")
    response.raw_headers.extend(error_headers(error))
    return response


async def _on_http_error(request: Request, error: Exception) -> Response:
    """The router's own refusals, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        path = route_path(request.scope)[:200]
        refusal = HttpError(404, f"there is no route {path!r}; /openapi.json lists all", code="not_found")
    elif error.status_code == 405:
        refusal = HttpError(405, f"{request.method} is not offered here", code="method_not_allowed")
        error.headers = {"allow": ", ".join(_methods(request))}
    else:
        refusal = HttpError(error.status_code, str(error.detail), code="http_error")
    response = await _on_error(request, refusal)
    response.headers.update(error.headers or {})
    return response


def _methods(request: Request) -> list[str]:
    """What the path of a request is offered to: several routes may have it."""
    there = (r for r in request.app.routes if isinstance(r, Endpoint) and r.matches(request.scope)[0] is not Match.NONE)
    methods = set().union(*(route.methods or () for route in there))
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))
