"""The application before several models: it finds the one that a request is for, and hands the request on."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.core.errors import BadRequest, QuireError
from quire.engine.edge.turns import Turns
from quire.server.api.replies import Load, Readiness, Version
from quire.server.http.body import off_loop, read_bytes, read_json, read_struct
from quire.server.http.errors import HttpError, ModelNotFound
from quire.server.http.exchange import Exchange
from quire.server.http.http_metrics import HttpMetrics
from quire.server.http.watchers import watchers
from quire.server.keys import Keys
from quire.server.options import ServerOptions
from quire.server.playground import pages
from quire.server.service import VERSION, Service, tell
from quire.server.several.pool import Pool, Slot

AGAIN = {"retry-after": "1"}


@dataclass
class LoadedModel:
    """A model behind an application of its own (`pool.Running`). `free` is called once its engine is closed."""

    app: ASGIApp
    service: Service
    free: Callable[[], None]

    @property
    def busy(self) -> bool:
        """Whether it works for somebody."""
        return self.service.active > 0 or self.service.engine.in_flight > 0

    @property
    def failure(self) -> QuireError | None:
        """Why its engine is dead, if it is."""
        return self.service.engine.failure

    def close(self) -> None:
        """End its engine."""
        self.service.engine.close()
        self.free()


class NamedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/models/load and /v1/models/unload."""

    model: str


class StateCard(msgspec.Struct, kw_only=True):
    """A model in /v1/models. `status`: loaded, loading, unloaded or failed; then `error` says why.

    `needed_bytes`: of weights and KV cache, as its headers say.
    """

    id: str
    created: int
    root: str
    status: str
    pinned: bool
    needed_bytes: int
    max_model_len: int | None
    parent: str | None = None
    object: str = "model"
    owned_by: str = "quire"
    error: str | None = None


class StateList(msgspec.Struct, kw_only=True):
    """Response of /v1/models."""

    data: list[StateCard]
    object: str = "list"


class AllEngines:
    """What signals and the gateway do with the engines of a pool (`door.Engines`). No death of one ends the server."""

    failure: QuireError | None = None

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.turns = Turns()

    @property
    def loaded(self) -> list[Service]:
        """Of models that are loaded."""
        return [cast(LoadedModel, s.running).service for s in self._pool.slots.values() if s.running is not None]

    def check_room(self) -> None:
        """Which queue is full is known once the model is: nothing is refused before."""

    def restart(self) -> None:
        """Start those that are loaded anew."""
        for service in self.loaded:
            service.engine.restart()

    def fail_all(self, error: QuireError) -> None:
        """End every request in flight."""
        for service in self.loaded:
            service.engine.fail_all(error)


class Several:
    """The state of a server of several models (`door.Door`)."""

    def __init__(self, pool: Pool, options: ServerOptions) -> None:
        self.pool, self.options = pool, options
        self.engine = AllEngines(pool)
        self.draining, self.active, self.created = False, 0, int(time.time())
        self.keys = Keys(options)
        self.registry = CollectorRegistry()
        self.http = HttpMetrics(self.registry)
        self.watchers = watchers(options)

    def ended(self, exchange: Exchange) -> None:
        """Count an exchange and show it to those who watch."""
        tell(exchange, self.http, self.watchers)

    def close(self) -> None:
        """Let those who watch finish."""
        for watcher in self.watchers:
            watcher.close()

    def slot(self, name: object) -> Slot:
        """The model that a request names, by itself or by one of its adapters; the first one where it names none."""
        slots = self.pool.slots
        if name is None:
            return next(iter(slots.values()))
        if isinstance(name, str):
            for wanted in (name, name.removesuffix(":latest")):  # Ollama's clients write it behind every name
                if wanted in slots:
                    return slots[wanted]
                for slot in slots.values():
                    if wanted in _adapters(slot):
                        return slot
        known = ", ".join(map(repr, slots))
        raise ModelNotFound(f"model: {str(name)[:200]!r} is not served here; there are {known}", param="model")


def _adapters(slot: Slot) -> tuple[str, ...]:
    """Names of a model's adapters: those it has, or those it will be loaded with."""
    if slot.running is not None:
        return cast(LoadedModel, slot.running).service.engine.info.adapters
    return tuple(str(adapter).partition("=")[0] for adapter in slot.listed.config.lora.lora_modules)


class Front:
    """Pure ASGI, so that streams pass through untouched. What is about no one model is answered here."""

    def __init__(self, several: Several) -> None:
        self._several = several
        self._own: dict[tuple[str, str], Callable[[Several, Request], Awaitable[Response]]] = {
            ("GET", "/v1/models"): list_models,
            ("POST", "/v1/models/load"): load_model,
            ("POST", "/v1/models/unload"): unload_model,
            ("GET", "/health"): health,
            ("GET", "/ping"): health,
            ("POST", "/ping"): health,
            ("GET", "/livez"): health,
            ("GET", "/readyz"): readyz,
            ("GET", "/load"): load,
            ("GET", "/version"): version,
            ("GET", "/metrics"): metrics,
        }
        self._pages = {page.path: page for page in pages()} if several.options.playground else {}

    @property
    def public(self) -> frozenset[str]:
        """Paths that ask for no key."""
        return frozenset(self._pages)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request (ASGI)."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        request = Request(scope, receive)
        handler = self._own.get((scope["method"], path))
        if handler is not None:
            scope["route"] = _Route(path)
            response = await handler(self._several, request)
            await response(scope, receive, send)
        elif scope["method"] == "GET" and path in self._pages:
            await self._pages[path].handle(scope, receive, send)
        else:
            await self._hand_on(request, path, send)

    async def _hand_on(self, request: Request, path: str, send: Send) -> None:
        scope, receive, name = request.scope, request.receive, request.query_params.get("model")
        if scope["method"] == "POST":
            options = self._several.options
            data = await read_bytes(request, options.max_body_bytes, options.body_timeout)
            name = await off_loop(len(data), _named, data)
            receive = _again(data, request.receive)
        elif found := re.fullmatch(r"/v1/models/(.+)", path):
            slot = self._several.slot(found[1])
            scope["route"] = _Route("/v1/models/{model:path}")
            await _json(_cards(self._several, slot, found[1])[0])(scope, receive, send)
            return
        elif name is None:  # responses are kept for all models: any of them can show one
            loaded = (s for s in self._several.pool.slots.values() if s.running is not None)
            name = next((slot.listed.name for slot in loaded), None)
        async with self._several.pool.use(self._several.slot(name).listed.name) as running:
            loaded_model = cast(LoadedModel, running)
            loaded_model.service.engine.start()
            await loaded_model.app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Load pinned models at the start, without being waited for; end all of them at the end."""
        pool, loads = self._several.pool, []
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                pinned = [slot.listed.name for slot in pool.slots.values() if slot.listed.pinned]
                loads = [asyncio.create_task(_try_load(pool, name)) for name in pinned]
                await send({"type": "lifespan.startup.complete"})
            else:
                for task in loads:
                    task.cancel()
                await pool.close()
                await send({"type": "lifespan.shutdown.complete"})
                return


class _Route(msgspec.Struct):
    """What an `Exchange` reads of a route."""

    path: str


async def _try_load(pool: Pool, name: str) -> None:
    try:
        await pool.load(name)
    except QuireError:
        return  # it is in the log and in /v1/models, and the next request tries again


def _named(data: bytes) -> Any:
    """What a body says in `model`; what is wrong with a body is said by the route that it is for."""
    try:
        value = read_json(data) if data else None
    except BadRequest:
        return None
    return (value.get("model") or value.get("name")) if isinstance(value, dict) else None


def _again(data: bytes, receive: Receive) -> Receive:
    """A body that was read, to be read once more; then what comes behind it."""
    left: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]

    async def replay() -> Message:
        return left.pop() if left else await receive()

    return replay


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _cards(several: Several, slot: Slot, name: str | None = None) -> list[StateCard]:
    """A model and its adapters, or the one of them that is called `name`."""
    several.pool.look()
    listed, info = slot.listed, None
    if slot.running is not None:
        info = cast(LoadedModel, slot.running).service.engine.info
    return [
        StateCard(
            id=one,
            created=several.created,
            root=listed.config.model.model,
            status=slot.state,
            pinned=listed.pinned,
            needed_bytes=listed.needed,
            max_model_len=info.max_model_len if info is not None else None,
            parent=None if one == listed.name else listed.name,
            error=slot.error or None,
        )
        for one in ((name,) if name is not None else (listed.name, *_adapters(slot)))
    ]


async def list_models(several: Several, request: Request) -> Response:
    """Every model with its state, and its adapters."""
    return _json(StateList(data=[card for slot in several.pool.slots.values() for card in _cards(several, slot)]))


async def _administered(several: Several, request: Request) -> Slot:
    """The model that an administrator names."""
    if several.keys.needed and not request.state.tenant.admin:
        raise HttpError(403, 'this key may not load or unload models: it has no "admin": true', code="not_admin")
    body = await read_struct(request, several.options, lambda _: NamedModel)
    return several.slot(body.model)


async def load_model(several: Several, request: Request) -> Response:
    """Load a model now; answers once it is there."""
    slot = await _administered(several, request)
    await several.pool.load(slot.listed.name)
    return _json(_cards(several, slot, slot.listed.name)[0])


async def unload_model(several: Several, request: Request) -> Response:
    """Unload a model once its requests in flight have ended."""
    slot = await _administered(several, request)
    await several.pool.unload(slot.listed.name)
    return _json(_cards(several, slot, slot.listed.name)[0])


async def health(several: Several, request: Request) -> Response:
    """200 while the server's event loop turns: models come and go."""
    return Response(status_code=200)


async def readyz(several: Several, request: Request) -> Response:
    """200 while requests are taken."""
    ready = not several.draining
    reply = _json(Readiness(ready=ready, checks={"not draining": ready}), 200 if ready else 503)
    reply.headers.update({} if ready else AGAIN)
    return reply


async def load(several: Several, request: Request) -> Response:
    """How many API requests are being served."""
    return _json(Load(server_load=several.active))


async def version(several: Several, request: Request) -> Response:
    """The server's version."""
    return _json(Version(version=VERSION))


class Merged(Collector):
    """The metrics of several registries, one family for each name: a sample that all have is there once."""

    def __init__(self, registries: Iterable[CollectorRegistry]) -> None:
        self._registries = tuple(registries)

    def collect(self) -> Iterable[Metric]:
        """The metric families of this moment."""
        found: dict[str, Metric] = {}
        seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
        for registry in self._registries:
            for family in registry.collect():
                fresh = []
                for sample in family.samples:
                    key = (sample.name, tuple(sorted(sample.labels.items())))
                    if key not in seen:
                        seen.add(key)
                        fresh.append(sample)
                family.samples = fresh
                if (first := found.setdefault(family.name, family)) is not family:
                    first.samples.extend(fresh)
        return found.values()


class States(Collector):
    """A gauge for each model and state."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._slots = tuple(slots)

    def collect(self) -> Iterable[Metric]:
        """The metric family of this moment."""
        family = GaugeMetricFamily("quire:model_state", "1 = the model's state.", labels=["model_name", "state"])
        for slot in self._slots:
            for state in ("unloaded", "loading", "loaded", "failed"):
                family.add_metric([slot.listed.name, state], float(slot.state == state))
        yield family


async def metrics(several: Several, request: Request) -> Response:
    """Everything Prometheus scrapes, of all models that are loaded."""
    several.pool.look()
    own = CollectorRegistry()
    own.register(States(several.pool.slots.values()))
    parts = [several.registry, own, *(service.engine.metrics.registry for service in several.engine.loaded)]
    text = await asyncio.to_thread(lambda: generate_latest(cast(CollectorRegistry, Merged(parts))))
    return Response(text, media_type=CONTENT_TYPE_LATEST)
