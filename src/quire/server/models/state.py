"""The state of a server: its models, keys, counts and watchers, for the gateway, for signals and for its routes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import cast

import msgspec
from prometheus_client import CollectorRegistry

from quire.core.errors import BadRequest, QuireError
from quire.engine.frontend.streams import CallQueue
from quire.server.http.access_log import watchers
from quire.server.http.activity import Activity
from quire.server.http.errors import ModelNotFound
from quire.server.http.exchange import Exchange
from quire.server.http.gateway import Engines
from quire.server.http.history import History
from quire.server.http.metrics import HttpMetrics
from quire.server.keys import Keys
from quire.server.models.pool import Pool, PooledModel
from quire.server.server_options import ServerOptions
from quire.server.service import Service, untagged

logger = logging.getLogger("quire.server")


@dataclass
class LoadedModel:
    """A model that is loaded (`pool.Running`). `until` is closed after its engine."""

    service: Service
    until: ExitStack

    def begin(self) -> None:
        """Start to read what its engine says."""
        self.service.engine.start()

    @property
    def busy(self) -> bool:
        """Whether its engine works for somebody."""
        return self.service.engine.in_flight > 0

    @property
    def failure(self) -> QuireError | None:
        """Why its engine is dead, if it is."""
        return self.service.engine.failure

    def close(self) -> None:
        """End its engine."""
        self.service.engine.close()
        self.until.close()


class PoolEngines:
    """The engines of models that are loaded when they are asked for (`gateway.Engines`). No death of one ends the
    server."""

    failure: QuireError | None = None

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.turns = CallQueue()

    def check_room(self) -> None:
        """Refuse nothing: which queue is full is known once the model of a request is."""

    def restart(self) -> None:
        """Start those that are loaded anew."""
        for service in loaded_services(self._pool):
            service.engine.restart()

    def fail_all(self, error: QuireError) -> None:
        """End every request in flight, and those that wait for a load."""
        self._pool.refuse(error)
        for service in loaded_services(self._pool):
            service.engine.fail_all(error)


class ModelServer:
    """The state of a server of one model or of several (`gateway.ServerState`).

    `permanent`: the model that the server was started with, which all requests are for; its engine's death ends the
    server. None where `pool` loads models when requests name them; `started` then says whether the pinned ones were
    loaded, or failed. `active` counts requests being served, `draining` is set by the first SIGTERM.
    """

    def __init__(self, pool: Pool, options: ServerOptions, http: HttpMetrics) -> None:
        """Raises `ConfigError` for options that cannot work, and for a file of keys that cannot be read."""
        options.validate()
        self.pool, self.http = pool, http
        self.permanent = None if pool.permanent is None else service_of(pool.permanent)
        self.options = options.sized(True) if self.permanent is None else self.permanent.options
        self.engines: Engines = PoolEngines(pool) if self.permanent is None else self.permanent.engine
        self.draining, self.active, self.created = False, 0, int(time.time())
        self.started = False
        self.keys = Keys(options)
        self.watchers = watchers(options)
        self.activity, self.history = Activity(), History()

    async def start(self) -> None:
        """Read what a permanent model's engine says, and load pinned models."""
        await self.pool.start()
        self.started = True

    @property
    def loaded(self) -> list[Service]:
        """Models that are loaded."""
        return loaded_services(self.pool)

    @property
    def registries(self) -> list[CollectorRegistry]:
        """What /metrics is made of."""
        return [self.http.registry, *(service.engine.metrics.registry for service in self.loaded)]

    def ended(self, exchange: Exchange) -> None:
        """Count an exchange and show it to those who watch; what fails in one of them is no matter of the client's."""
        if not exchange.background:
            self.http.ended(exchange.route, exchange.method, exchange.status, exchange.seconds)
        for watcher in (self.activity, *self.watchers):
            try:
                watcher.see(exchange)
            except Exception:
                logger.exception("%s failed on request %s", type(watcher).__name__, exchange.request_id)

    def close(self) -> None:
        """Let those who watch finish."""
        for watcher in self.watchers:
            watcher.close()

    def named_models(self) -> Iterator[tuple[PooledModel, str]]:
        """Every name that a request may give, of models and of their adapters, with its model."""
        return ((model, name) for model in self.pool.models.values() for name in names_of(model))

    def model(self, name: object) -> PooledModel:
        """The model that a request names, by itself or by one of its adapters; the first one where it names none.

        `BadRequest` for what is no name, `ModelNotFound`.
        """
        if name is None:
            return next(iter(self.pool.models.values()))
        if not isinstance(name, str):
            raise BadRequest(f"model: must be a name, not {type(name).__name__}", param="model")
        return self.resolve(name)[0]

    def resolve(self, name: str) -> tuple[PooledModel, str]:
        """The model that has `name`, and the name as it is listed: without Ollama's tag. `ModelNotFound`."""
        for each in (name, untagged(name)):
            if (found := self.find(each)) is not None:
                return found, each
        if self.permanent is not None:
            raise self.permanent.not_found(name)
        known = ", ".join(map(repr, self.pool.models))
        raise ModelNotFound(f"model: {name[:200]!r} is not served here; there are {known}", param="model")

    def find(self, name: str) -> PooledModel | None:
        """The model that is called `name`, or has an adapter of that name."""
        adapted = (model for model, each in self.named_models() if each == name)
        return self.pool.models.get(name) or next(adapted, None)


def service_of(model: PooledModel) -> Service | None:
    """The service of a model, while it is loaded."""
    return None if model.running is None else cast(LoadedModel, model.running).service


def loaded_services(pool: Pool) -> list[Service]:
    """Services of models that are loaded."""
    return [found for model in pool.models.values() if (found := service_of(model)) is not None]


def names_of(model: PooledModel) -> tuple[str, ...]:
    """Names of a model and of its adapters: those that it has, or will be loaded with."""
    service = service_of(model)
    adapters = model.entry.adapters if service is None else service.engine.info.adapters
    return (model.entry.name, *model.entry.aliases, *adapters)


def keep_adapter(model: PooledModel, name: str, folder: str) -> None:
    """Have a model loaded with an adapter from now on, or without it where `folder` is empty."""
    config, lora = model.entry.config, model.entry.config.lora
    others = (module for module in lora.lora_modules if module.partition("=")[0] != name)
    modules = (*others, *([f"{name}={folder}"] if folder else []))
    config = msgspec.structs.replace(config, lora=msgspec.structs.replace(lora, lora_modules=modules))
    model.entry = replace(model.entry, config=config)
