"""What a server of several models is to the gateway, to signals and to its routes."""

from __future__ import annotations

import time
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
from quire.server.http.history import History
from quire.server.http.metrics import HttpMetrics
from quire.server.keys import Keys
from quire.server.models.pool import Pool, Slot
from quire.server.server_options import ServerOptions
from quire.server.service import Service, tell, untagged


@dataclass
class LoadedModel:
    """A model with a service of its own (`pool.Running`); `until` is closed after its engine."""

    service: Service
    until: ExitStack

    def begin(self) -> None:
        """Read what its engine says."""
        self.service.engine.start()

    @property
    def busy(self) -> bool:
        """Whether it works for somebody."""
        return self.service.engine.in_flight > 0

    @property
    def failure(self) -> QuireError | None:
        """Why its engine is dead, if it is."""
        return self.service.engine.failure

    def close(self) -> None:
        """End its engine."""
        self.service.engine.close()
        self.until.close()


class AllEngines:
    """The engines of a pool, for signals and the gateway (`gateway.Engines`). No death of one ends the server."""

    failure: QuireError | None = None

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.turns = CallQueue()

    @property
    def loaded(self) -> list[Service]:
        """Models that are loaded."""
        return [found for slot in self._pool.slots.values() if (found := service_of(slot)) is not None]

    def check_room(self) -> None:
        """Which queue is full is known once the model is: nothing is refused before."""

    def restart(self) -> None:
        """Start those that are loaded anew."""
        for service in self.loaded:
            service.engine.restart()

    def fail_all(self, error: QuireError) -> None:
        """End every request in flight, and those that wait for a load."""
        self._pool.refuse(error)
        for service in self.loaded:
            service.engine.fail_all(error)


class MultiModelServer:
    """The state of a server of several models (`gateway.ServerState`)."""

    def __init__(self, pool: Pool, options: ServerOptions) -> None:
        self.pool, self.options = pool, options.sized(True)
        self.engine = AllEngines(pool)
        self.draining, self.active, self.created = False, 0, int(time.time())
        self.started = False  # pinned models are loaded, or cannot be
        self.keys = Keys(options)
        self.registry = CollectorRegistry()
        self.http = HttpMetrics(self.registry)
        self.watchers = watchers(options)
        self.activity, self.history = Activity(), History()

    @property
    def registries(self) -> list[CollectorRegistry]:
        """What /metrics is made of."""
        return [self.registry, *(service.engine.metrics.registry for service in self.engine.loaded)]

    def ended(self, exchange: Exchange) -> None:
        """Count an exchange and show it to those who watch."""
        tell(exchange, self.http, (self.activity, *self.watchers))

    def close(self) -> None:
        """Let those who watch finish."""
        for watcher in self.watchers:
            watcher.close()

    def slot(self, name: object) -> Slot:
        """The model that a request names, by itself or by one of its adapters; the first one where it names none.

        `BadRequest` for what is no name, `ModelNotFound`.
        """
        slots = self.pool.slots
        if name is None:
            return next(iter(slots.values()))
        if not isinstance(name, str):
            raise BadRequest(f"model: must be a name, not {type(name).__name__}", param="model")
        found = self.owner(name) or self.owner(untagged(name))
        if found is None:
            known = ", ".join(map(repr, slots))
            raise ModelNotFound(f"model: {name[:200]!r} is not served here; there are {known}", param="model")
        return found

    def owner(self, name: str) -> Slot | None:
        """The model that is called `name`, or has an adapter of that name."""
        slots = self.pool.slots
        return slots.get(name) or next((slot for slot in slots.values() if name in adapters_of(slot)), None)


def service_of(slot: Slot) -> Service | None:
    """Service of a model, while it is loaded."""
    return None if slot.running is None else cast(LoadedModel, slot.running).service


def adapters_of(slot: Slot) -> tuple[str, ...]:
    """Names of a model's adapters: those that it has, or will be loaded with."""
    service = service_of(slot)
    return slot.listed.adapters if service is None else service.engine.info.adapters


def keep_adapter(slot: Slot, name: str, folder: str) -> None:
    """Have a model loaded with an adapter from now on, or without it where `folder` is empty."""
    config, lora = slot.listed.config, slot.listed.config.lora
    others = (module for module in lora.lora_modules if module.partition("=")[0] != name)
    modules = (*others, *([f"{name}={folder}"] if folder else []))
    config = msgspec.structs.replace(config, lora=msgspec.structs.replace(lora, lora_modules=modules))
    slot.listed = replace(slot.listed, config=config)
