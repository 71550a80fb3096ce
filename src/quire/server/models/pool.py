"""Models that share a budget of memory: loaded when asked for, the least recently used making room once it is idle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, Overloaded, QuireError, Unavailable


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A model that may be loaded. `pinned`: at the start, and it makes no room for others.

    `speech`: options of the server that are otherwise for this model (`OF_MODELS`). `needed`: bytes of its weights and
    KV cache as planned from the headers of its files; of these, too, are what follows it. `root`: what they call it;
    `scheme`: of its weights; `passport`: what was measured of it, {} where nothing was.
    """

    name: str
    config: EngineConfig
    speech: Mapping[str, Any]
    needed: int
    max_model_len: int
    folder: str
    root: str
    scheme: str
    passport: Mapping[str, Any]
    pinned: bool = False

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that it is loaded with."""
        return tuple(module.partition("=")[0] for module in self.config.lora.lora_modules)


def check_list(models: Sequence[Listed], budget: int) -> None:
    """`ConfigError` for names that are there twice, and for a model that `budget` bytes never have room for."""
    names = [name for model in models for name in (model.name, *model.adapters)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"--models: {twice[0]!r} is there twice; names of models and adapters differ", param="models")
    if not budget:
        return
    pinned = sum(model.needed for model in models if model.pinned)
    if pinned > budget:
        raise _too_large("pinned models need", pinned, budget, "")
    for model in models:
        if not model.pinned and model.needed + pinned > budget:
            beside = f" beside {pinned / 1e9:.3g} GB of pinned ones" if pinned else ""
            raise _too_large(f"model {model.name!r} needs", model.needed, budget, beside)


def _too_large(who: str, needed: int, budget: int, beside: str) -> ConfigError:
    return ConfigError(
        f"--models-memory-gb {budget / 1e9:g}: {who} {needed / 1e9:.3g} GB{beside}; raise it, or lower "
        "kv_cache_memory_bytes of the model",
        param="models_memory_gb",
    )


logger = logging.getLogger("quire.server")

State = Literal["unloaded", "loading", "loaded", "failed"]
STATES: tuple[State, ...] = ("unloaded", "loading", "loaded", "failed")
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0
"""Seconds before a model that could not be loaded is tried again: twice as many each time."""
LOOK_SECONDS = 0.02
"""Between looks whether a model that is to leave is idle, or a load given up: little beside the seconds of a load."""


class Running(Protocol):
    """A model that is loaded."""

    def begin(self) -> None:
        """Use the model from now on; called on the event loop."""

    @property
    def busy(self) -> bool:
        """Whether it works for somebody."""

    @property
    def failure(self) -> QuireError | None:
        """Why it is dead, if it is."""

    def close(self) -> None:
        """End it and free its memory; waits for that."""


@dataclass(eq=False)
class Slot:
    """A listed model and what is known of it. `users` have it, `waiting` wait until it is loaded: a mark each.

    Whoever waits has it at the moment when it is loaded, so that nothing can have it leave before they wake.

    `ending`: its memory is not free yet. `leaving`: it takes no more requests, and makes room once it is idle.
    `error` says why it `failed`, `failures` times in a row; `again`: when it may be tried next. Times are of
    `time.monotonic`.
    """

    listed: Listed
    state: State = "unloaded"
    running: Running | None = None
    users: set[object] = field(default_factory=set)
    waiting: set[object] = field(default_factory=set)
    ending: asyncio.Task[None] | None = None
    used: float = 0.0
    leaving: bool = False
    loads: int = 0
    error: str = ""
    failures: int = 0
    again: float = 0.0

    @property
    def idle(self) -> bool:
        """Nothing would be lost with it."""
        return not self.users and (self.running is None or not self.running.busy)


class Pool:
    """Belongs to the event loop.

    One model is loaded at a time, in the order in which they were asked for, and one that has to make room takes no new
    requests, which wait until it is loaded again. So each gets its turn, however many requests there are for others.
    """

    def __init__(
        self,
        models: Sequence[Listed],
        start: Callable[[Listed, ExitStack], Running],
        budget: int = 0,
        wait: float = 300.0,
    ) -> None:
        """`start` loads a model, in a thread; what it puts on the stack is closed where it fails, or is to be given up.

        `budget`: bytes for all that are loaded, 0 = they all fit. `wait`: seconds that a request waits for a load.
        `ConfigError` for models that could never be loaded.
        """
        check_list(models, budget)
        self.slots = {model.name: Slot(model) for model in models}
        self._start, self._budget, self._wait = start, budget, wait
        self._turn = asyncio.Lock()
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._refusal: QuireError | None = None

    @contextlib.asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Running]:
        """The model, loaded, which stays until the end.

        `Unavailable` where it cannot be had in time, or could not be loaded; `Overloaded` where as many wait for it as
        may be in its queue.
        """
        slot, mark = self.slots[name], object()
        most = slot.listed.config.scheduler.max_num_queued_reqs
        if len(slot.waiting) >= most:
            raise Overloaded(f"model {name!r} is not loaded yet, and {most} requests wait for it; try again later")
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
            async with asyncio.timeout(self._wait), self._turn:
                await self._leave(slot)
                slot.state, slot.error, slot.failures = "unloaded", "", 0
        except TimeoutError:
            raise Unavailable(f"model {name!r} is still in use after {self._wait:g} s; try again later") from None

    def look(self) -> None:
        """Notice models that have died."""
        for slot in self.slots.values():
            self._look(slot)

    def refuse(self, error: QuireError) -> None:
        """Load nothing more; who waits gets `error`."""
        self._refusal = self._refusal or error
        for task in self._loads.values():
            task.cancel()

    async def close(self) -> None:
        """End all of them, also one that is being loaded."""
        self.refuse(Unavailable("the server is shutting down; send the request again in a moment"))
        await asyncio.gather(*self._loads.values(), return_exceptions=True)
        for slot in self.slots.values():
            self._end(slot)
        await asyncio.gather(*(slot.ending for slot in self.slots.values() if slot.ending is not None))

    async def _had(self, slot: Slot, mark: object) -> Running:
        name, until = slot.listed.name, time.monotonic() + self._wait
        while True:
            self._look(slot)
            if slot.running is not None and (mark in slot.users or not slot.leaving):
                slot.waiting.discard(mark)
                slot.users.add(mark)
                return slot.running
            if self._refusal is not None:
                raise self._refusal
            if slot.state == "failed" and (left := slot.again - time.monotonic()) > 0:
                wait = math.ceil(left)
                raise Unavailable(
                    f"model {name!r} could not be loaded: {slot.error}; it is tried again in {wait} s", retry_after=wait
                )
            task = self._loads.get(name)
            if task is None or task.done():
                task = self._loads[name] = asyncio.create_task(self._load(slot))
                task.add_done_callback(_seen)
            await asyncio.wait({task}, timeout=max(0.0, until - time.monotonic()))
            if not task.done():
                raise Unavailable(f"model {name!r} was not loaded within {self._wait:g} s; try again later")
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    def _look(self, slot: Slot) -> None:
        """Notice that a model has died."""
        if slot.running is not None and (failure := slot.running.failure) is not None:
            self._end(slot)
            self._failed(slot, failure.message)

    async def _load(self, slot: Slot) -> None:
        """Load a model when it is its turn, if anybody still waits for it; `Unavailable` where there is no room."""
        async with self._turn:
            if slot.running is not None or not slot.waiting:
                slot.users |= slot.waiting if slot.running is not None else set()
                return
            slot.state = "loading"
            try:
                await self._room(slot)
                logger.info("loading model %s", slot.listed.name)
                running = await self._started(slot.listed)
            except Unavailable:
                slot.state = "unloaded"
                raise
            except QuireError as error:
                self._failed(slot, error.message)
            except asyncio.CancelledError:
                slot.state = "unloaded"
                raise
            except Exception:
                logger.exception("model %s", slot.listed.name)
                self._failed(slot, "an internal error, which the server's log shows")
            else:
                slot.running, slot.state, slot.error, slot.failures = running, "loaded", "", 0
                slot.loads += 1
                slot.used = time.monotonic()
                slot.users |= slot.waiting
                running.begin()

    async def _started(self, listed: Listed) -> Running:
        until = ExitStack()
        load = asyncio.get_running_loop().run_in_executor(None, self._start, listed, until)
        load.add_done_callback(_seen)
        try:
            return await asyncio.shield(load)
        except BaseException:  # a load that is cancelled goes on in its thread, and may yet put something on the stack
            while not load.done():
                await asyncio.to_thread(until.close)
                await asyncio.wait({load}, timeout=LOOK_SECONDS)
            await asyncio.to_thread(until.close)
            raise

    def _failed(self, slot: Slot, error: str) -> None:
        slot.state, slot.error = "failed", error
        slot.failures += 1
        slot.again = time.monotonic() + min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(slot.failures - 1, 16))
        logger.error("model %s: %s", slot.listed.name, error)

    async def _room(self, slot: Slot) -> None:
        """Have others leave until `slot` fits. `Unavailable` where they are in use for long, or nobody waits for it."""
        name = slot.listed.name
        try:
            async with asyncio.timeout(self._wait):
                while slot.waiting:
                    if ending := [s.ending for s in self.slots.values() if s.ending and not s.ending.done()]:
                        await asyncio.wait(ending)
                        continue  # others may have died meanwhile
                    loaded = [s for s in self.slots.values() if s.running is not None]
                    taken = sum(s.listed.needed for s in loaded)
                    if not self._budget or taken + slot.listed.needed <= self._budget:
                        return
                    others = [s for s in loaded if not s.listed.pinned]
                    await self._leave(min(others, key=lambda s: (not s.idle, s.used)), lambda: bool(slot.waiting))
        except TimeoutError:
            raise Unavailable(f"model {name!r}: the models in its place are in use for {self._wait:g} s") from None
        raise Unavailable(f"model {name!r}: nobody waits for it any more")

    async def _leave(self, slot: Slot, wanted: Callable[[], bool] = lambda: True) -> None:
        """Wait until a model is idle, and end it; it stays where its place is not `wanted` any more."""
        slot.leaving = True
        try:
            while not slot.idle:
                if not wanted():
                    return
                await asyncio.sleep(LOOK_SECONDS)
            if slot.running is not None:
                logger.info("unloading model %s", slot.listed.name)
                slot.state = "unloaded"
            self._end(slot)
            if slot.ending is not None:
                await asyncio.wait({slot.ending})
        finally:
            slot.leaving = False

    def _end(self, slot: Slot) -> None:
        """End a model, if it is loaded, in a thread."""
        running, slot.running = slot.running, None
        if running is not None:
            slot.ending = asyncio.create_task(_closed(slot.listed.name, running))


def _seen(task: asyncio.Future[Any]) -> None:
    """Whoever waited for a load may have left before it failed."""
    if not task.cancelled():
        task.exception()


async def _closed(name: str, running: Running) -> None:
    try:
        await asyncio.to_thread(running.close)
    except Exception:
        logger.exception("model %s did not end well", name)
