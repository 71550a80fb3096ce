"""The ASGI application: routes, error handlers and the gateway around them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.routing import Route as Endpoint

from quire.core.errors import ConfigError, QuireError
from quire.server.apis.openai.responses import Responses
from quire.server.http.errors import HttpError, error_headers
from quire.server.http.gateway import Gateway
from quire.server.http.json_response import JsonResponse
from quire.server.http.routes import route_path
from quire.server.load_log import log_load
from quire.server.models.dispatch import ReleaseAfterResponse, caller
from quire.server.models.state import ModelServer
from quire.server.openapi import openapi_endpoint
from quire.server.pages import live_pages, pages, reference_pages
from quire.server.routes import TABLE
from quire.server.service import VERSION


def create_app(server: ModelServer) -> Starlette:
    """The application of a server: all routes, with the gateway and the pages before them.

    Handlers find the server as `app.state.server`. Raises `ConfigError` for a root path that a route begins with.
    """
    options = server.options
    app = Starlette(lifespan=partial(_lifespan, server))
    app.state.server, app.state.responses = server, Responses()
    shown = [*live_pages(), *reference_pages(), *(pages() if options.playground else [])]
    app.add_middleware(Gateway, server=server, table=TABLE, pages=frozenset(page.path for page in shown))
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=options.allowed_origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=["x-request-id"],
        )  # fmt: skip
    if server.permanent is None:
        app.add_middleware(ReleaseAfterResponse)
    app.add_exception_handler(QuireError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    for route in TABLE.routes:
        if options.root_path and route.path.startswith(f"{options.root_path}/"):
            told = "is the beginning of a path of the server's own, as"
            raise ConfigError(f"--root-path {options.root_path} {told} {route.path}; choose another", param="root_path")
    own = (Endpoint(route.path, caller(server, route), methods=[route.method]) for route in TABLE.routes)
    app.routes.extend([openapi_endpoint(VERSION, TABLE.routes, options.strict), *own, *shown])
    return app


@asynccontextmanager
async def _lifespan(server: ModelServer, app: Starlette) -> AsyncIterator[None]:
    with server.activity.captured_logs():
        tasks = [
            asyncio.create_task(server.start()),
            asyncio.create_task(server.history.keep(lambda: server.registries, server.activity.tokens)),
        ]
        if server.options.log_stats:
            tasks.append(asyncio.create_task(log_load(server)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await server.pool.close()


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, QuireError)
    body = request.state.exchange.dialect.error(error)
    response = JsonResponse(body, error.status)
    response.raw_headers.extend(error_headers(error))
    return response


async def _on_http_error(request: Request, error: Exception) -> Response:
    """The router's own refusals, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        path = route_path(request.scope)[:200]
        # llama.cpp's server has many of OpenAI's routes without the first part, too.
        meant = next((each for each in (f"/v1{path}", f"/v1{path}s") if TABLE.at(each)), "")
        hint = f"did you mean {meant}? " if meant else ""
        refusal = HttpError(404, f"there is no route {path!r}; {hint}/openapi.json lists all", code="not_found")
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
