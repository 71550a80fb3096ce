"""What the live page at `/dashboard` asks beside /metrics: state, history, and what is wrong."""

from __future__ import annotations

import time
from collections import Counter

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.http.activity import Counts
from quire.server.http.diagnosis import Diagnosis, diagnose
from quire.server.http.gateway import ServerState
from quire.server.http.history import History, Past
from quire.server.http.json_response import JsonResponse
from quire.server.http.routes import Route
from quire.server.models.state import ModelServer
from quire.server.service import VERSION, Service


class LiveModel(msgspec.Struct, kw_only=True):
    """A model that is loaded. `token_rates`: output tokens per second in each half minute of the last 15, oldest
    first; null: nothing is known of it."""

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
    token_rates: list[float | None]


class LiveTenant(msgspec.Struct, kw_only=True):
    """Counts of a tenant since the start; `in_flight`: sequences now. `token_rates`: tokens of prompts and outputs per
    second in each half minute of the last 15, oldest first, counted as answers end; null: nothing is known of it."""

    name: str
    in_flight: int
    requests: int
    refused: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    token_rates: list[float | None]


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


async def live_history(server: ServerState, request: Request) -> Response:
    """Return the history of the live dashboard's charts for the last 15 minutes. Public if /metrics is."""
    found = server.history.told(time.monotonic())
    return JsonResponse(msgspec.json.encode(found), headers={"cache-control": "no-store"})


async def live_diagnosis(server: ModelServer, request: Request) -> Response:
    """Return what is wrong with the server now, as sentences. Without a key they name no tenant."""
    named = request.state.tenant.admin or not server.keys.needed
    found = diagnose(server.history, named=named, draining=server.draining)
    return JsonResponse(msgspec.json.encode(found), headers={"cache-control": "no-store"})


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
        models=[_model(service, server.history) for service in services],
        tenants=[
            _tenant(name, held[name], server.activity.tenants.get(name, Counts()), server.history) for name in names
        ],
        incidents=[
            LiveIncident(first=i.first, last=i.last, level=i.level, message=i.message, count=i.count)
            for i in reversed(list(server.activity.incidents))
            if whole or i.tenant == tenant.name != ""
        ],
    )
    return JsonResponse(msgspec.json.encode(found), headers={"cache-control": "no-store"})


def _tenant(name: str, in_flight: int, counts: Counts, history: History) -> LiveTenant:
    return LiveTenant(
        name=name,
        in_flight=in_flight,
        requests=counts.requests,
        refused=counts.refused,
        failed=counts.failed,
        prompt_tokens=counts.prompt_tokens,
        output_tokens=counts.output_tokens,
        token_rates=history.tenant_rates(name),
    )


def _model(service: Service, history: History) -> LiveModel:
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
        token_rates=history.rates("vllm:generation_tokens_total", info.served_name),
    )


ROUTES = (
    Route("GET", "/dashboard/state", live_state, reply=(Live,), per_model=False, group="Monitoring"),
    Route(
        "GET",
        "/dashboard/history",
        live_history,
        reply=(Past,),
        access="monitoring",
        per_model=False,
        group="Monitoring",
    ),
    Route(
        "GET",
        "/dashboard/diagnosis",
        live_diagnosis,
        reply=(Diagnosis,),
        access="monitoring",
        per_model=False,
        group="Monitoring",
    ),
)
