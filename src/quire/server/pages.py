"""The pages at `/` and `/dashboard`, files of the package read once; and what the latter asks beside /metrics."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as PageRoute

import quire
from quire.server.http.activity import Counts
from quire.server.http.gateway import ServerState
from quire.server.http.history import Past
from quire.server.http.routes import Route
from quire.server.models.state import ModelServer
from quire.server.service import VERSION, Service

FOLDER = Path(__file__).parent / "web"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    # Text of models is shown by text nodes alone; `require-trusted-types-for` has the browser refuse all else.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # modules of two versions must not meet
}


def pages() -> list[PageRoute]:
    """A route for each file: index.html is `/`, the others lie under `/playground/` as they do here.

    Links in them are relative, so that they hold under any path a proxy shows the server at.
    """
    files = (path for path in sorted(FOLDER.rglob("*")) if path.suffix in KINDS)
    names = {path: path.relative_to(FOLDER).as_posix() for path in files}
    return [page_route(path, "/" if name == "index.html" else f"/playground/{name}") for path, name in names.items()]


def page_route(path: Path, where: str) -> PageRoute:
    """A file of the package at `where`."""
    body, kind = path.read_bytes(), KINDS[path.suffix]

    async def page(_: Request) -> Response:
        return Response(body, headers=HEADERS, media_type=kind)

    return PageRoute(where, page, methods=["GET"], include_in_schema=False)


LIVE = FOLDER.parent / "live"
SHARED = tuple(FOLDER / name for name in ("api.js", "dom.js", "metrics.js", "icon.svg"))
UPLOT = Path(quire.__file__).parent / "dashboard" / "web" / "uplot"


class LiveModel(msgspec.Struct, kw_only=True):
    """A model that is loaded."""

    name: str
    max_model_len: int
    backend: str
    isa: str
    threads: int
    quantization: str
    kv_cache_dtype: str
    num_blocks: int
    block_size: int
    policy: str
    replicas: int


class LiveTenant(msgspec.Struct, kw_only=True):
    """Counts of a tenant since the start; `in_flight`: sequences now. `weight`: of its share where that counts."""

    name: str
    in_flight: int
    requests: int
    refused: int
    failed: int
    prompt_tokens: int
    output_tokens: int


class LiveIncident(msgspec.Struct, kw_only=True):
    """Times in seconds since 1970."""

    first: float
    last: float
    level: str
    message: str
    count: int


class Live(msgspec.Struct, kw_only=True):
    """Response of /dashboard/state. `whole`: of everybody; false where the key shows its own tenant alone."""

    version: str
    started: int
    draining: bool
    whole: bool
    models: list[LiveModel]
    tenants: list[LiveTenant]
    incidents: list[LiveIncident]


def live_pages() -> list[PageRoute]:
    """`/dashboard`, and a route below it for each file of the page: those that it shares with the playground, too."""
    files = [path for folder in (LIVE, UPLOT) for path in sorted(folder.iterdir()) if path.suffix in KINDS]
    return [
        page_route(path, "/dashboard" if path.name == "index.html" else f"/dashboard/{path.name}")
        for path in (*files, *SHARED)
    ]


async def live_history(server: ServerState, request: Request) -> Response:
    """Return the history of the live dashboard's charts for the last 15 minutes. Public if /metrics is."""
    found = server.history.told(time.monotonic())
    return Response(msgspec.json.encode(found), media_type="application/json", headers={"cache-control": "no-store"})


async def live_state(server: ModelServer, request: Request) -> Response:
    """Return models, tenants and incidents for the live dashboard."""
    tenant, services = request.state.tenant, server.loaded
    whole = tenant.admin or not server.keys.needed
    held: Counter[str] = Counter()
    for service in services:
        held.update(service.engine.admission.held)
    names = sorted({*server.activity.tenants, *held}) if whole else [tenant.name]
    found = Live(
        version=VERSION,
        started=server.created,
        draining=server.draining,
        whole=whole,
        models=[_model(service) for service in services],
        tenants=[_tenant(name, held[name], server.activity.tenants.get(name, Counts())) for name in names],
        incidents=[
            LiveIncident(first=i.first, last=i.last, level=i.level, message=i.message, count=i.count)
            for i in reversed(list(server.activity.incidents))
            if whole or i.tenant == tenant.name != ""
        ],
    )
    return Response(msgspec.json.encode(found), media_type="application/json", headers={"cache-control": "no-store"})


def _tenant(name: str, in_flight: int, counts: Counts) -> LiveTenant:
    return LiveTenant(
        name=name,
        in_flight=in_flight,
        requests=counts.requests,
        refused=counts.refused,
        failed=counts.failed,
        prompt_tokens=counts.prompt_tokens,
        output_tokens=counts.output_tokens,
    )


def _model(service: Service) -> LiveModel:
    info, parallel = service.engine.info, service.config.parallel
    return LiveModel(
        name=info.served_name,
        max_model_len=info.max_model_len,
        backend=info.backend,
        isa=info.isa,
        threads=info.threads,
        quantization=info.quantization,
        kv_cache_dtype=info.kv_cache_dtype,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        policy=info.scheduling_policy,
        replicas=parallel.data_parallel_size,
    )


ROUTES = (
    Route("GET", "/dashboard/state", live_state, reply=(Live,), per_model=False),
    Route("GET", "/dashboard/history", live_history, reply=(Past,), access="monitoring", per_model=False),
)
