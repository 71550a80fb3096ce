"""Models that share a budget of memory: loaded when asked for, the least recently used making room once it is idle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, EngineFailure, QuireError, Unavailable

logger = logging.getLogger("quire.server")

State = Literal["unloaded", "loading", "loaded", "failed"]
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0
"""Seconds before a model that could not be loaded is tried again: twice as many each time."""


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A model that may be loaded. `needed`: bytes of weights and KV cache, as its headers say. `pinned`: it stays."""

    name: str
    config: EngineConfig
    needed: int
    pinned: bool = False


class Running(Protocol):
    """A model that is loaded."""

    @property
    def busy(self) -> bool:
        """Whether it works for somebody."""

    @property
    def failure(self) -> QuireError | None:
        """Why it is dead, if it is."""

    def close(self) -> None:
        """End it and free its memory; waits for that."""


@dataclass
class Slot:
    """A listed model and what is known of it. `users` have it, `waiting` wait until it is loaded: a mark each.

    Whoever waits has it at the moment when it is loaded, so that nothing can have it leave before they wake.

    `leaving`: it takes no more requests, and makes room once it is idle. Times are of `time.monotonic`.
    """

    listed: Listed
    state: State = "unloaded"
    running: Running | None = None
    users: set[object] = field(default_factory=set)
    waiting: set[object] = field(default_factory=set)
    used: float = 0.0
    leaving: bool = False
    error: str = ""
    failures: int = 0
    again: float = 0.0

    @property
    def idle(self) -> bool:
        """Nothing would be lost with it."""
        return not self.users and (self.running is None or not self.running.busy)


class Pool:
    """Belongs to the event loop. `start` loads a model, in a thread; `budget` in bytes, 0 = all models fit.

    One model is loaded at a time, in the order in which they were asked for. So every one of them gets its turn: a
    model that has to make room takes no new requests, which wait until it is loaded again.
    """

    def __init__(
        self, models: Sequence[Listed], start: Callable[[Listed], Running], budget: int = 0, wait: float = 300.0
    ) -> None:
        """`wait`: seconds that a request waits for a load. `ConfigError` for models that could never be loaded."""
        self.slots = {model.name: Slot(model) for model in models}
        self._start, self._budget, self._wait = start, budget, wait
        self._turn = asyncio.Lock()
        self._loads: dict[str, asyncio.Task[None]] = {}
        self.closed = False
        check_budget(models, budget)

    @contextlib.asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Running]:
        """The model, loaded, which stays until the end. `Unavailable` where it cannot be had in time, or failed."""
        slot, mark = self.slots[name], object()
        slot.waiting.add(mark)
        try:
            yield await self._had(slot, mark)
        finally:
            slot.waiting.discard(mark)
            slot.users.discard(mark)
            slot.used = time.monotonic()

    async def load(self, name: str) -> None:
        """Load a model; raises as `use` does, but tries one that failed at once."""
        self.slots[name].again = 0.0
        async with self.use(name):
            pass

    async def unload(self, name: str) -> None:
        """End a model once it is idle, for which requests in flight are waited for; `Unavailable` if that is long."""
        slot = self.slots[name]
        try:
            async with asyncio.timeout(self._wait):
                async with self._turn:
                    await self._leave(slot)
                    slot.state, slot.error, slot.failures = "unloaded", "", 0
        except TimeoutError:
            raise Unavailable(f"model {name!r} is still in use after {self._wait:g} s; try again later") from None

    async def close(self) -> None:
        """End all of them."""
        self.closed = True
        for task in self._loads.values():
            task.cancel()
        for slot in self.slots.values():
            running, slot.running, slot.state = slot.running, None, "unloaded"
            if running is not None:
                await asyncio.to_thread(running.close)

    async def _had(self, slot: Slot, mark: object) -> Running:
        name, until = slot.listed.name, time.monotonic() + self._wait
        while True:
            self._look(slot)
            if slot.running is not None and (mark in slot.users or not slot.leaving):
                slot.users.add(mark)
                return slot.running
            if slot.state == "failed" and (left := slot.again - time.monotonic()) > 0:
                raise Unavailable(
                    f"model {name!r} could not be loaded: {slot.error}; it is tried again in {math.ceil(left)} s"
                )
            task = self._loads.get(name)
            if task is None or task.done():
                task = self._loads[name] = asyncio.create_task(self._load(slot))
            done, _ = await asyncio.wait({task}, timeout=max(0.0, until - time.monotonic()))
            if not done:
                raise Unavailable(f"model {name!r} was not loaded within {self._wait:g} s; try again later")
            if self.closed:
                raise Unavailable("the server is shutting down; send the request again in a moment")

    def _look(self, slot: Slot) -> None:
        """Notice that a model has died."""
        running = slot.running
        if running is not None and running.failure is not None:
            slot.running = None
            asyncio.get_running_loop().run_in_executor(None, running.close)
            self._failed(slot, running.failure.message)

    def look(self) -> None:
        """Notice models that have died."""
        for slot in self.slots.values():
            self._look(slot)

    async def _load(self, slot: Slot) -> None:
        async with self._turn:
            if slot.running is not None and not slot.leaving:
                return
            slot.state = "loading"
            try:
                async with asyncio.timeout(self._wait):
                    await self._room(slot)
                logger.info("loading model %s", slot.listed.name)
                running = await self._started(slot.listed)
            except QuireError as error:
                self._failed(slot, error.message)
            except TimeoutError:
                self._failed(slot, f"the models in its place were in use for {self._wait:g} s")
            except asyncio.CancelledError:
                slot.state = "unloaded"
                raise
            except Exception:
                logger.exception("model %s", slot.listed.name)
                self._failed(slot, "an internal error, which the server's log shows")
            else:
                slot.running, slot.state, slot.error, slot.failures = running, "loaded", "", 0
                slot.used = time.monotonic()
                slot.users |= slot.waiting

    async def _started(self, listed: Listed) -> Running:
        """Shielded: an engine that is being started when the server ends must be closed, not forgotten."""
        task = asyncio.create_task(asyncio.to_thread(self._start, listed))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_close_result)
            raise

    def _failed(self, slot: Slot, error: str) -> None:
        slot.state, slot.error, slot.leaving = "failed", error, False
        slot.failures += 1
        slot.again = time.monotonic() + min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(slot.failures - 1, 16))
        logger.error("model %s: %s", slot.listed.name, error)

    async def _room(self, slot: Slot) -> None:
        """Have others leave until `slot` fits."""
        while self._budget and self._taken() + slot.listed.needed > self._budget:
            others = [s for s in self.slots.values() if s.running is not None and not s.listed.pinned]
            if not others:
                raise EngineFailure("pinned models leave no room for it")
            await self._leave(min(others, key=lambda s: (not s.idle, s.used)))

    def _taken(self) -> int:
        return sum(s.listed.needed for s in self.slots.values() if s.running is not None)

    async def _leave(self, slot: Slot) -> None:
        """Wait until a model is idle, and end it."""
        slot.leaving = True
        try:
            while not slot.idle:
                await asyncio.sleep(0.02)
            running, slot.running = slot.running, None
            if running is not None:
                slot.state = "unloaded"
                logger.info("unloading model %s", slot.listed.name)
                await asyncio.to_thread(running.close)
        finally:
            slot.leaving = False


def _close_result(task: asyncio.Task[Running]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


def check_budget(models: Sequence[Listed], budget: int) -> None:
    """`ConfigError` for names that are there twice, and for a model that could not be loaded beside pinned ones."""
    names = [model.name for model in models]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"--models: {twice[0]!r} is there twice; names must differ", param="models")
    pinned = sum(model.needed for model in models if model.pinned)
    for model in models:
        beside = 0 if model.pinned else pinned
        needed = pinned if model.pinned else model.needed
        if budget and needed + beside > budget:
            taken = f" beside {beside / 1e9:.3g} GB of pinned models" if beside else ""
            what = "all pinned models need" if model.pinned else f"model {model.name!r} needs"
            raise ConfigError(
                f"--models-memory-gb {budget / 1e9:g}: {what} {needed / 1e9:.3g} GB{taken}; raise it, or lower "
                "kv_cache_memory_bytes of the model",
                param="models_memory_gb",
            )
