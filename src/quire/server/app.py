"""The ASGI application: routes, error handlers and the gateway around them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, QuireError
from quire.engine.frontend.async_engine import AsyncEngine
from quire.server.api.admin import load_lora_adapter, reset_prefix_cache, unload_lora_adapter
from quire.server.api.chat import create_chat_completion
from quire.server.api.completions import create_completion
from quire.server.api.openapi import openapi_route
from quire.server.api.others import OTHERS
from quire.server.api.replies import Load, ModelCard, ModelList, Readiness, Version, modalities
from quire.server.api.responses import Responses, cancel_response, create_response, delete_response, read_response
from quire.server.api.tokenize import detokenize, tokenize
from quire.server.api.vectors import create_embedding, create_rerank, create_score
from quire.server.http.access import watchers
from quire.server.http.dialects import dialect_of, route_path
from quire.server.http.errors import HttpError, error_headers
from quire.server.http.middleware import Door, Gateway
from quire.server.options import ServerOptions
from quire.server.pages import live_history, live_pages, live_state, pages
from quire.server.service import VERSION, Service
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

H = TypeVar("H", bound=Callable[..., Awaitable[Response]])
Handler = Callable[[Service, Request], Awaitable[Response]]

AGAIN = {"retry-after": "1"}


class Bound(NamedTuple):
    """A route whose endpoint needs nothing but the request."""

    method: str
    path: str
    endpoint: Callable[[Request], Awaitable[Response]]
    summary: str


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

    return assembled(service, bound(ROUTES, lambda handler, request: handler(service, request)), lifespan)


def assembled(
    door: Door, routes: Iterable[Bound], lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]]
) -> Starlette:
    """An application of `routes` with the gateway and the pages before them; `app.state.service` is the `door`."""
    options = door.options

    @asynccontextmanager
    async def heard(app: Starlette) -> AsyncIterator[None]:
        with door.seen.heard():
            async with lifespan(app):
                kept = asyncio.create_task(door.history.keep(lambda: door.registries))
                try:
                    yield
                finally:
                    kept.cancel()

    app = Starlette(lifespan=heard)
    app.state.service, app.state.responses = door, Responses()
    shown = [*live_pages(), *(pages() if options.playground else [])]
    app.add_middleware(Gateway, service=door, pages=frozenset(page.path for page in shown))
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=options.allowed_origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=["x-request-id"],
        )  # fmt: skip
    app.add_exception_handler(QuireError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    routes = tuple(routes)
    for route in routes:
        if options.root_path and route.path.startswith(f"{options.root_path}/"):
            told = "is the beginning of a path of the server's own, as"
            raise ConfigError(f"--root-path {options.root_path} {told} {route.path}; choose another", param="root_path")
    described = openapi_route(VERSION, [(route.method, route.path, route.summary) for route in routes], options.strict)
    own = (Route(route.path, route.endpoint, methods=[route.method]) for route in routes)
    app.routes.extend([described, *own, *shown])
    return app


def bound(routes: Iterable[tuple[str, str, H]], call: Callable[[H, Request], Awaitable[Response]]) -> list[Bound]:
    """Routes whose handlers are called by `call`: method, path and handler of each."""
    return [
        Bound(method, path, _endpoint(handler, call), (handler.__doc__ or "").splitlines()[0])
        for method, path, handler in routes
    ]


def _endpoint(
    handler: H, call: Callable[[H, Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await call(handler, request)

    return endpoint


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, QuireError)
    body = dialect_of(route_path(request.scope)).error(error)
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
    there = (r for r in request.app.routes if isinstance(r, Route) and r.matches(request.scope)[0] is not Match.NONE)
    methods = set().union(*(route.methods or () for route in there))
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _model_card(service: Service, name: str) -> ModelCard:
    info = service.engine.info
    parent = service.names[0] if name in info.adapters else None
    return ModelCard(
        id=name,
        created=service.created,
        root=info.model,
        parent=parent,
        max_model_len=info.max_model_len,
        input_modalities=modalities(info.pictures),
        quire=service.passport if service.passport and parent is None else msgspec.UNSET,
    )


async def models(service: Service, request: Request) -> Response:
    """The served model under each of its names, and its adapters."""
    names = (*service.names, *service.engine.info.adapters)
    return _json(ModelList(data=[_model_card(service, name) for name in names]))


async def model(service: Service, request: Request) -> Response:
    """One model by name."""
    name = request.path_params["model"]
    service.check_model(name)
    return _json(_model_card(service, service.known(name)))


async def health(service: Service, request: Request) -> Response:
    """200 while there is an engine that answers; 503 while it is started again, or is gone."""
    return Response(status_code=200) if service.engine.ready else Response(status_code=503, headers=AGAIN)


async def livez(door: Door, request: Request) -> Response:
    """200 while the server's event loop turns."""
    return Response(status_code=200)


async def readyz(service: Service, request: Request) -> Response:
    """200 while requests are taken and the engine makes progress."""
    engine, options = service.engine, service.options
    return readiness(
        {
            "engine alive": engine.ready,
            "not draining": not service.draining,
            "engine makes progress": engine.stalled_seconds < options.stall_timeout,
        }
    )


def readiness(checks: dict[str, bool]) -> Response:
    """200 where all hold."""
    ready = all(checks.values())
    reply = _json(Readiness(ready=ready, checks=checks), 200 if ready else 503)
    reply.headers.update({} if ready else AGAIN)
    return reply


async def load(door: Door, request: Request) -> Response:
    """How many API requests are being served."""
    return _json(Load(server_load=door.active))


async def version(door: Door, request: Request) -> Response:
    """The server's version."""
    return _json(Version(version=VERSION))


async def metrics(service: Service, request: Request) -> Response:
    """Everything Prometheus scrapes."""
    return Response(await asyncio.to_thread(service.engine.metrics.render), media_type=CONTENT_TYPE_LATEST)


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/completions", create_completion),
    ("POST", "/v1/chat/completions", create_chat_completion),
    ("POST", "/v1/embeddings", create_embedding),
    ("POST", "/v1/score", create_score),
    ("POST", "/score", create_score),
    ("POST", "/v1/rerank", create_rerank),
    ("POST", "/rerank", create_rerank),
    ("POST", "/v1/responses", create_response),
    ("GET", "/v1/responses/{response_id}", read_response),
    ("DELETE", "/v1/responses/{response_id}", delete_response),
    ("POST", "/v1/responses/{response_id}/cancel", cancel_response),
    ("GET", "/v1/models", models),
    ("GET", "/v1/models/{model:path}", model),
    ("POST", "/v1/load_lora_adapter", load_lora_adapter),
    ("POST", "/v1/unload_lora_adapter", unload_lora_adapter),
    ("POST", "/reset_prefix_cache", reset_prefix_cache),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("GET", "/health", health),
    ("GET", "/ping", health),
    ("POST", "/ping", health),
    ("GET", "/livez", livez),
    ("GET", "/readyz", readyz),
    ("GET", "/load", load),
    ("GET", "/version", version),
    ("GET", "/metrics", metrics),
    ("GET", "/dashboard/state", live_state),
    ("GET", "/dashboard/history", live_history),
    *((other.method, other.path, other.handler) for other in OTHERS),
)
