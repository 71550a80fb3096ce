"""What probes, load balancers and Prometheus ask: /health, /livez, /readyz, /load, /version and /metrics."""

from __future__ import annotations

import asyncio

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from quire.server.apis.openai.replies import Load, Readiness, Version
from quire.server.http.gateway import ServerState
from quire.server.http.routes import Route
from quire.server.service import VERSION, Service

AGAIN = {"retry-after": "1"}


async def health(service: Service, request: Request) -> Response:
    """Return 200 while an engine answers, and 503 while it restarts or is gone."""
    return Response(status_code=200) if service.engine.ready else Response(status_code=503, headers=AGAIN)


async def livez(server: ServerState, request: Request) -> Response:
    """Return 200 while the server's event loop runs."""
    return Response(status_code=200)


async def readyz(service: Service, request: Request) -> Response:
    """Return 200 while the server accepts requests and the engine makes progress."""
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


async def load(server: ServerState, request: Request) -> Response:
    """Return the number of running API requests."""
    return _json(Load(server_load=server.active))


async def version(server: ServerState, request: Request) -> Response:
    """Return the server's version."""
    return _json(Version(version=VERSION))


async def metrics(service: Service, request: Request) -> Response:
    """Return all metrics for Prometheus."""
    return Response(await asyncio.to_thread(service.engine.metrics.render), media_type=CONTENT_TYPE_LATEST)


def _json(value: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


_NO_ENGINE = "No engine answers now"
ROUTES = (
    Route("GET", "/health", health, access="monitoring", unavailable=_NO_ENGINE),
    Route("GET", "/ping", health, access="monitoring", unavailable=_NO_ENGINE),
    Route("POST", "/ping", health, access="monitoring", unavailable=_NO_ENGINE),
    Route("GET", "/livez", livez, access="public", per_model=False),
    Route("GET", "/readyz", readyz, reply=(Readiness,), access="public", unavailable="Not ready, and why"),
    Route("GET", "/load", load, reply=(Load,), per_model=False),
    Route("GET", "/version", version, reply=(Version,), per_model=False),
    Route("GET", "/metrics", metrics, text=True, access="monitoring"),
)
