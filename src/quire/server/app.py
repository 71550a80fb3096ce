"""The ASGI application: routes, error handlers and the gateway around them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Match, Route

from quire.core.config import EngineConfig
from quire.core.errors import QuireError
from quire.engine.edge.async_engine import AsyncEngine
from quire.server.api.adapters import load_lora_adapter, unload_lora_adapter
from quire.server.api.chat import create_chat_completion
from quire.server.api.completions import create_completion
from quire.server.api.openapi import described, operation
from quire.server.api.others import OTHERS
from quire.server.api.replies import Load, ModelCard, ModelList, Readiness, Version
from quire.server.api.reset import reset_prefix_cache
from quire.server.api.responses import Responses, cancel_response, create_response, delete_response, read_response
from quire.server.api.tokenize import detokenize, tokenize
from quire.server.api.vectors import create_embedding, create_rerank, create_score
from quire.server.http.dialects import dialect_of
from quire.server.http.errors import HttpError, error_headers
from quire.server.http.middleware import Gateway
from quire.server.http.watchers import watchers
from quire.server.options import ServerOptions
from quire.server.playground import pages
from quire.server.service import VERSION, Service
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

Handler = Callable[[Service, Request], Awaitable[Response]]

AGAIN = {"retry-after": "1"}


def create_app(
    engine: AsyncEngine,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    options: ServerOptions,
    config: EngineConfig | None = None,
    behind: bool = False,
) -> FastAPI:
    """The server's application; `app.state.service` is its `Service`. The caller closes the engine.

    `config`: what the engine was told. `behind`: another application has the gateway, the watchers and the pages.
    """
    options.validate()
    seeing = () if behind else watchers(options)
    service = Service(engine, tokenizer, template, options, config or EngineConfig(), watchers=seeing)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield

    # No docs pages: they load scripts from elsewhere. /openapi.json describes everything.
    app = FastAPI(title="quire", version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service, app.state.responses = service, Responses()
    shown = pages() if options.playground and not behind else []
    if not behind:
        app.add_middleware(Gateway, service=service, public=frozenset(page.path for page in shown))
    if options.allowed_origins and not behind:
        app.add_middleware(CORSMiddleware, **cors(options))
    app.add_exception_handler(QuireError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    _add_routes(app, service)
    app.routes.extend(shown)
    app.openapi = partial(described, app, app.openapi, options.strict)  # type: ignore[method-assign]
    return app


def cors(options: ServerOptions) -> dict[str, Any]:
    """What pages of other origins may do."""
    everything = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": ["x-request-id"]}
    return {"allow_origins": options.allowed_origins, **everything}


def _add_routes(app: FastAPI, service: Service) -> None:
    routes: list[tuple[str, str, Handler]] = [
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
        *((other.method, other.path, other.handler) for other in OTHERS),
    ]
    for method, path, handler in routes:
        name = f"{method.lower()}{re.sub('[{}]|:path', '', path).replace('/', '_')}"
        app.add_api_route(
            path,
            _endpoint(handler, service),
            methods=[method],
            name=name,
            operation_id=name,
            summary=(handler.__doc__ or "").splitlines()[0],
            openapi_extra=operation(path),
            response_class=Response,
            response_model=None,
        )


def _endpoint(handler: Handler, service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(service, request)

    return endpoint


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, QuireError)
    body = dialect_of(request.url.path).error(error)
    response = Response(body, error.status, media_type="application/json")
    response.raw_headers.extend(error_headers(error))
    return response


async def _on_http_error(request: Request, error: Exception) -> Response:
    """The router's own refusals, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        path = request.url.path[:200]
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
    return _json(_model_card(service, name))


async def health(service: Service, request: Request) -> Response:
    """200 while there is an engine that answers; 503 while it is started again, or is gone."""
    return Response(status_code=200) if service.engine.ready else Response(status_code=503, headers=AGAIN)


async def livez(service: Service, request: Request) -> Response:
    """200 while the server's event loop turns."""
    return Response(status_code=200)


async def readyz(service: Service, request: Request) -> Response:
    """200 while requests are taken and the engine makes progress."""
    engine, options = service.engine, service.options
    checks = {
        "engine alive": engine.ready,
        "not draining": not service.draining,
        "engine makes progress": engine.stalled_seconds < options.stall_timeout,
    }
    ready = all(checks.values())
    reply = _json(Readiness(ready=ready, checks=checks), 200 if ready else 503)
    reply.headers.update({} if ready else AGAIN)
    return reply


async def load(service: Service, request: Request) -> Response:
    """How many API requests are being served."""
    return _json(Load(server_load=service.active))


async def version(service: Service, request: Request) -> Response:
    """The server's version."""
    return _json(Version(version=VERSION))


async def metrics(service: Service, request: Request) -> Response:
    """Everything Prometheus scrapes."""
    return Response(await asyncio.to_thread(service.engine.metrics.render), media_type=CONTENT_TYPE_LATEST)
