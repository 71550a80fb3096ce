"""What a server of several models answers itself: what is about all of them, or about none."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import msgspec
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from quire.server import monitoring, pages
from quire.server.apis.ollama import models as ollama_models
from quire.server.apis.ollama.chat import stamp
from quire.server.apis.ollama.models import OllamaModel, OllamaModels, details_of, loaded_models
from quire.server.apis.openai import models as one
from quire.server.apis.openai.replies import NamedModel, Readiness, StateCard, StateList, modalities
from quire.server.http.body import read_struct
from quire.server.http.errors import HttpError
from quire.server.http.routes import Handler, Kinds, Route, RouteTable
from quire.server.models.pool import STATES, Slot
from quire.server.models.state import MultiModelServer, adapters_of, service_of
from quire.server.monitoring import readiness
from quire.server.pages import Live, state_of
from quire.server.routes import TABLE


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _card(server: MultiModelServer, slot: Slot, name: str) -> StateCard:
    """Card of a model, or of an adapter of it."""
    server.pool.look()
    listed, service = slot.listed, service_of(slot)
    own = name == listed.name
    return StateCard(
        id=name,
        created=server.created,
        root=listed.root,
        parent=None if own else listed.name,
        max_model_len=listed.max_model_len if service is None else service.engine.info.max_model_len,
        input_modalities=modalities(service is not None and service.engine.info.takes_images),
        quire=dict(listed.passport) if own and listed.passport else msgspec.UNSET,
        status=slot.state,
        pinned=listed.pinned,
        needed_bytes=listed.needed,
        error=slot.error or None,
    )


async def list_models(server: MultiModelServer, request: Request) -> Response:
    """Every model with its state, and its adapters."""
    cards = [_card(server, slot, name) for slot in server.pool.slots.values() for name in _names(slot)]
    return _json(StateList(data=cards))


async def get_model(server: MultiModelServer, request: Request) -> Response:
    """One model by name, with its state."""
    name = request.path_params["model"]
    slot = server.slot(name)
    return _json(_card(server, slot, name if name in adapters_of(slot) else slot.listed.name))


async def load_model(server: MultiModelServer, request: Request) -> Response:
    """Load a model now, and reply when it is loaded."""
    slot = await _administered(server, request)
    await server.pool.load(slot.listed.name)
    return _json(_card(server, slot, slot.listed.name))


async def unload_model(server: MultiModelServer, request: Request) -> Response:
    """Unload a model after its running requests. The next request that names it loads it again."""
    slot = await _administered(server, request)
    await server.pool.unload(slot.listed.name)
    return _json(_card(server, slot, slot.listed.name))


async def _administered(server: MultiModelServer, request: Request) -> Slot:
    """The model that an administrator names."""
    if server.keys.needed and not request.state.tenant.admin:
        raise HttpError(403, 'this key may not load or unload models: it has no "admin": true', code="forbidden")
    body = await read_struct(request, server.options, lambda _: NamedModel)
    return server.slot(body.model)


async def tags(server: MultiModelServer, request: Request) -> Response:
    """The names of all models, as Ollama lists what it has."""
    found = [_tag(server, slot, name) for slot in server.pool.slots.values() for name in _names(slot)]
    return _json(OllamaModels(models=found))


def _tag(server: MultiModelServer, slot: Slot, name: str) -> OllamaModel:
    listed = slot.listed
    return OllamaModel(
        name=name,
        model=name,
        modified_at=stamp(server.created),
        size=listed.needed,
        digest=hashlib.sha256(f"{listed.folder}\0{listed.scheme}\0{name}".encode()).hexdigest(),
        details=details_of(listed.folder, listed.scheme),
    )


async def ps(server: MultiModelServer, request: Request) -> Response:
    """What is loaded, as Ollama lists what runs."""
    server.pool.look()
    return _json(OllamaModels(models=[found for service in server.engine.loaded for found in loaded_models(service)]))


async def health(server: MultiModelServer, request: Request) -> Response:
    """200 while the server's event loop turns: models come and go."""
    return Response(status_code=200)


async def readyz(server: MultiModelServer, request: Request) -> Response:
    """200 while requests are taken, once pinned models are loaded, or cannot be."""
    return readiness({"not draining": not server.draining, "pinned models were loaded": server.started})


async def metrics(server: MultiModelServer, request: Request) -> Response:
    """Everything Prometheus scrapes, of all models that are loaded."""
    server.pool.look()
    registries = [server.registry, *(service.engine.metrics.registry for service in server.engine.loaded)]
    text = await asyncio.to_thread(rendered, registries, list(server.pool.slots.values()))
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def live_state(server: MultiModelServer, request: Request) -> Response:
    """Models that are loaded, tenants and incidents, for the live page."""
    return state_of(server, server.engine.loaded, request)


def _names(slot: Slot) -> tuple[str, ...]:
    return (slot.listed.name, *adapters_of(slot))


_ALL: dict[Handler, tuple[Handler, Kinds]] = {
    one.list_models: (list_models, (StateList,)),
    one.get_model: (get_model, (StateCard,)),
    ollama_models.tags: (tags, (OllamaModels,)),
    ollama_models.ps: (ps, (OllamaModels,)),
    monitoring.health: (health, ()),
    monitoring.readyz: (readyz, (Readiness,)),
    monitoring.metrics: (metrics, ()),
    pages.live_state: (live_state, (Live,)),
}
"""Handlers of one model, and what answers in their place for all models, with its replies."""
ROUTES = (
    Route(
        "POST",
        "/v1/models/load",
        load_model,
        body=(NamedModel,),
        reply=(StateCard,),
        access="admin",
        per_model=False,
    ),
    Route(
        "POST",
        "/v1/models/unload",
        unload_model,
        body=(NamedModel,),
        reply=(StateCard,),
        access="admin",
        per_model=False,
    ),
)


def _for_all(route: Route) -> Route:
    if route.handler not in _ALL:
        return route
    handler, reply = _ALL[route.handler]
    return replace(route, handler=handler, reply=reply, per_model=False)


MULTI_MODEL_TABLE = RouteTable((*map(_for_all, TABLE.routes), *ROUTES))


def rendered(registries: Iterable[CollectorRegistry], slots: Iterable[Slot]) -> bytes:
    """The text that Prometheus scrapes."""
    own = CollectorRegistry()
    own.register(_States(tuple(slots)))
    merged = _Merged((*registries, own))
    return generate_latest(cast(CollectorRegistry, merged))


class _Merged(Collector):
    """The metrics of server registries, one family for each name. A sample that all have, as the process's, is there
    once."""

    def __init__(self, registries: tuple[CollectorRegistry, ...]) -> None:
        self._registries = registries

    def collect(self) -> Iterable[Metric]:
        """The metric families of this moment."""
        found: dict[str, Metric] = {}
        seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
        for registry in self._registries:
            for family in registry.collect():
                merged = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    key = (sample.name, tuple(sorted(sample.labels.items())))
                    if key not in seen:
                        seen.add(key)
                        merged.samples.append(sample)
        return found.values()


class _States(Collector):
    """Which model is in which state, and how often it was loaded."""

    def __init__(self, slots: tuple[Slot, ...]) -> None:
        self._slots = slots

    def collect(self) -> Iterable[Metric]:
        """The metric families of this moment."""
        states = GaugeMetricFamily("quire:model_state", "1 = the model's state.", labels=["model_name", "state"])
        loads = CounterMetricFamily("quire:model_loads", "Times that a model was loaded.", labels=["model_name"])
        needed = GaugeMetricFamily(
            "quire:model_needed_bytes", "Bytes that a loaded model takes.", labels=["model_name"]
        )
        for slot in self._slots:
            name = slot.listed.name
            for state in STATES:
                states.add_metric([name, state], float(slot.state == state))
            loads.add_metric([name], slot.loads)
            needed.add_metric([name], slot.listed.needed)
        return (states, loads, needed)
