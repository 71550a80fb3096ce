"""What probes, load balancers and Prometheus ask: /health, /livez, /readyz, /load, /version and /metrics."""

from __future__ import annotations

import asyncio

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from quire.server.apis.openai.replies import Health, Load, Readiness, Version
from quire.server.http.gateway import ServerState
from quire.server.http.json_response import JsonResponse
from quire.server.http.routes import Route
from quire.server.models.metrics import render
from quire.server.models.state import ModelServer
from quire.server.service import VERSION

AGAIN = {"retry-after": "1"}


async def health(server: ModelServer, request: Request) -> Response:
    """Return 200 while the server can answer, and 503 while its engine restarts or is gone."""
    ready = server.permanent is None or server.permanent.engine.ready
    reply = _json(Health(status="ok" if ready else "no engine answers now"), 200 if ready else 503)
    reply.headers.update({} if ready else AGAIN)
    return reply


async def livez(server: ServerState, request: Request) -> Response:
    """Return 200 while the server's event loop runs."""
    return Response(status_code=200)


async def readyz(server: ModelServer, request: Request) -> Response:
    """Return 200 while the server accepts requests and its engine runs (several models: the pinned ones are loaded)."""
    if server.permanent is None:
        checks = {"not draining": not server.draining, "pinned models were loaded": server.started}
    else:
        engine = server.permanent.engine
        checks = {
            "engine alive": engine.ready,
            "not draining": not server.draining,
            "engine makes progress": engine.stalled_seconds < server.options.stall_timeout,
        }
    ready = all(checks.values())
    reply = _json(Readiness(ready=ready, checks=checks), 200 if ready else 503)
    reply.headers.update({} if ready else AGAIN)
    return reply


async def load(server: ServerState, request: Request) -> Response:
    """Return the number of running API requests."""
    return _json(Load(server_load=server.active))


async def version(server: ServerState, request: Request) -> Response:
    """Return the server's version."""
    return _json(Version(version=VERSION))


async def metrics(server: ModelServer, request: Request) -> Response:
    """Return all metrics for Prometheus, of all models that are loaded."""
    server.pool.note_failures()
    text = await asyncio.to_thread(render, server.registries, list(server.pool.models.values()))
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def _json(value: msgspec.Struct, status: int = 200) -> Response:
    return JsonResponse(msgspec.json.encode(value), status)


_NO_ENGINE = "No engine answers now"
ROUTES = (
    *(
        Route(
            method,
            path,
            health,
            reply=(Health,),
            access="monitoring",
            unavailable=_NO_ENGINE,
            per_model=False,
            group="Monitoring",
        )
        for method, path in (("GET", "/health"), ("GET", "/v1/health"), ("GET", "/ping"), ("POST", "/ping"))
    ),
    Route("GET", "/livez", livez, access="public", per_model=False, group="Monitoring"),
    Route(
        "GET",
        "/readyz",
        readyz,
        reply=(Readiness,),
        access="public",
        unavailable="Not ready, and why",
        per_model=False,
        group="Monitoring",
    ),
    Route("GET", "/load", load, reply=(Load,), per_model=False, group="Monitoring"),
    Route("GET", "/version", version, reply=(Version,), per_model=False, group="Monitoring"),
    Route("GET", "/metrics", metrics, text=True, access="monitoring", per_model=False, group="Monitoring"),
)
