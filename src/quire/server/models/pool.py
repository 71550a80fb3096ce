"""Models that share a budget of memory: loaded when asked for, the least recently used making room once it is idle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from quire.core.errors import Overloaded, QuireError, Unavailable
from quire.server.http.errors import HttpError
from quire.server.models.entry import ModelEntry, check_entries

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
class PooledModel:
    """A model of a pool, and its state. `users` use it, `waiting` wait until it is loaded: a mark for each request.

    A request that waits becomes a user at the moment when the model is loaded, so that it is not unloaded before.

    `permanent`: the server was started with it loaded; the pool neither loads nor ends it, and the server ends with it.
    `ending`: its memory is not free yet. `leaving`: it takes no more requests, and makes room once it is idle.
    `error` says why it `failed`, `failures` times in a row; `retry_at`: when it may be tried next. Times are of
    `time.monotonic`.
    """

    entry: ModelEntry
    permanent: bool = False
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
    retry_at: float = 0.0

    @property
    def idle(self) -> bool:
        """Nothing would be lost with it."""
        return not self.users and (self.running is None or not self.running.busy)


class Pool:
    """The models of a server. Belongs to the event loop.

    One model is loaded at a time, in the order in which they were asked for, and one that has to make room takes no new
    requests, which wait until it is loaded again. So each gets its turn, however many requests there are for others.
    """

    def __init__(
        self,
        entries: Sequence[ModelEntry],
        start: Callable[[ModelEntry, ExitStack], Running],
        budget: int = 0,
        wait: float = 300.0,
    ) -> None:
        """`start` loads a model, in a thread; what it puts on the stack is closed where it fails, or is to be given up.

        `budget`: bytes for all that are loaded, 0 = they all fit. `wait`: seconds that a request waits for a load.
        `ConfigError` for models that could never be loaded.
        """
        check_entries(entries, budget)
        self.models = {entry.name: PooledModel(entry) for entry in entries}
        self._start, self._budget, self._wait = start, budget, wait
        self._turn = asyncio.Lock()
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._refusal: QuireError | None = None

    @classmethod
    def of_one(cls, entry: ModelEntry, running: Running) -> Pool:
        """A pool of the one model that a server was started with; whoever loaded it ends it."""

        def start(entry: ModelEntry, until: ExitStack) -> Running:
            raise AssertionError(f"model {entry.name!r} is loaded for the life of the server")

        pool = cls((), start)
        pool.models[entry.name] = PooledModel(entry, permanent=True, state="loaded", running=running, loads=1)
        return pool

    @property
    def permanent(self) -> PooledModel | None:
        """The model that the server was started with; None where models are loaded when they are asked for."""
        return next((model for model in self.models.values() if model.permanent), None)

    async def start(self) -> None:
        """Use the model that is permanent, and load pinned ones, together; a request tries again what fails."""
        for model in self.models.values():
            if model.permanent and model.running is not None:
                model.running.begin()
        pinned = [m.entry.name for m in self.models.values() if m.entry.pinned and not m.permanent]
        await asyncio.gather(*(self._load_pinned(name) for name in pinned))

    async def _load_pinned(self, name: str) -> None:
        with contextlib.suppress(QuireError):  # it is in the log and in /v1/models
            await self.load(name)

    @contextlib.asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Running]:
        """The model, loaded, which stays until the end.

        `Unavailable` where it cannot be had in time, or could not be loaded; `Overloaded` where as many wait for it as
        may be in its queue.
        """
        model, mark = self.models[name], object()
        most = model.entry.config.scheduler.max_num_queued_reqs
        if len(model.waiting) >= most:
            raise Overloaded(f"model {name!r} is not loaded yet, and {most} requests wait for it; try again later")
        model.waiting.add(mark)
        try:
            yield await self._acquire(model, mark)
        finally:
            model.waiting.discard(mark)
            model.users.discard(mark)
            model.used = time.monotonic()

    async def load(self, name: str) -> None:
        """Load a model; raises as `use` does, but tries one that failed at once."""
        self.models[name].retry_at = 0.0
        async with self.use(name):
            pass

    async def unload(self, name: str) -> None:
        """End a model once it is idle, for which requests in flight are waited for; `Unavailable` if that is long.

        Raises `HttpError` (409) for the model that the server was started with.
        """
        model = self.models[name]
        if model.permanent:
            raise HttpError(
                409,
                f"model: {name!r} is loaded until the server ends; to load and unload models while it runs, "
                "start it with --models FILE or --model NAME=PATH",
                code="model_is_permanent",
                param="model",
            )
        try:
            async with asyncio.timeout(self._wait), self._turn:
                await self._unload_when_idle(model)
                model.state, model.error, model.failures = "unloaded", "", 0
        except TimeoutError:
            raise Unavailable(f"model {name!r} is still in use after {self._wait:g} s; try again later") from None

    def note_failures(self) -> None:
        """Notice models that have died."""
        for model in self.models.values():
            self._note_failure(model)

    def refuse(self, error: QuireError) -> None:
        """Load nothing more; who waits gets `error`."""
        self._refusal = self._refusal or error
        for task in self._loads.values():
            task.cancel()

    async def close(self) -> None:
        """End all that it has loaded, also one that is being loaded."""
        self.refuse(Unavailable("the server is shutting down; send the request again in a moment"))
        await asyncio.gather(*self._loads.values(), return_exceptions=True)
        for model in self.models.values():
            if not model.permanent:
                self._end(model)
        await asyncio.gather(*(model.ending for model in self.models.values() if model.ending is not None))

    async def _acquire(self, model: PooledModel, mark: object) -> Running:
        name, until = model.entry.name, time.monotonic() + self._wait
        while True:
            self._note_failure(model)
            if model.running is not None and (mark in model.users or not model.leaving):
                model.waiting.discard(mark)
                model.users.add(mark)
                return model.running
            if self._refusal is not None:
                raise self._refusal
            if model.state == "failed" and (left := model.retry_at - time.monotonic()) > 0:
                wait = math.ceil(left)
                raise Unavailable(
                    f"model {name!r} could not be loaded: {model.error}; it is tried again in {wait} s",
                    retry_after=wait,
                )
            task = self._loads.get(name)
            if task is None or task.done():
                task = self._loads[name] = asyncio.create_task(self._load(model))
                task.add_done_callback(_ignore_result)
            await asyncio.wait({task}, timeout=max(0.0, until - time.monotonic()))
            if not task.done():
                raise Unavailable(f"model {name!r} was not loaded within {self._wait:g} s; try again later")
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    def _note_failure(self, model: PooledModel) -> None:
        """Notice that a model has died."""
        if model.running is None or (failure := model.running.failure) is None:
            return
        if model.permanent:
            # Clients get no detail: messages of failures can hold paths, and the engine's reader has logged it.
            model.state, model.error = "failed", "its engine failed; the server's log says why"
        else:
            self._end(model)
            self._failed(model, failure.message)

    async def _load(self, model: PooledModel) -> None:
        """Load a model when it is its turn, if anybody still waits for it; `Unavailable` where there is no room."""
        async with self._turn:
            if model.running is not None or not model.waiting:
                model.users |= model.waiting if model.running is not None else set()
                return
            model.state = "loading"
            try:
                await self._make_room(model)
                logger.info("loading model %s", model.entry.name)
                running = await self._started(model.entry)
            except Unavailable:
                model.state = "unloaded"
                raise
            except QuireError as error:
                self._failed(model, error.message)
            except asyncio.CancelledError:
                model.state = "unloaded"
                raise
            except Exception:
                logger.exception("model %s", model.entry.name)
                self._failed(model, "an internal error, which the server's log shows")
            else:
                model.running, model.state, model.error, model.failures = running, "loaded", "", 0
                model.loads += 1
                model.used = time.monotonic()
                model.users |= model.waiting
                running.begin()

    async def _started(self, entry: ModelEntry) -> Running:
        until = ExitStack()
        load = asyncio.get_running_loop().run_in_executor(None, self._start, entry, until)
        load.add_done_callback(_ignore_result)
        try:
            return await asyncio.shield(load)
        except BaseException:  # a load that is cancelled goes on in its thread, and may yet put something on the stack
            while not load.done():
                await asyncio.to_thread(until.close)
                await asyncio.wait({load}, timeout=LOOK_SECONDS)
            await asyncio.to_thread(until.close)
            raise

    def _failed(self, model: PooledModel, error: str) -> None:
        model.state, model.error = "failed", error
        model.failures += 1
        model.retry_at = time.monotonic() + min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(model.failures - 1, 16))
        logger.error("model %s: %s", model.entry.name, error)

    async def _make_room(self, model: PooledModel) -> None:
        """Unload others until `model` fits. `Unavailable` where they are in use for long, or nobody waits for it."""
        name = model.entry.name
        try:
            async with asyncio.timeout(self._wait):
                while model.waiting:
                    if ending := [m.ending for m in self.models.values() if m.ending and not m.ending.done()]:
                        await asyncio.wait(ending)
                        continue  # others may have died meanwhile
                    loaded = [m for m in self.models.values() if m.running is not None]
                    taken = sum(m.entry.needed_bytes for m in loaded)
                    if not self._budget or taken + model.entry.needed_bytes <= self._budget:
                        return
                    others = [m for m in loaded if not m.entry.pinned]
                    oldest = min(others, key=lambda m: (not m.idle, m.used))
                    await self._unload_when_idle(oldest, lambda: bool(model.waiting))
        except TimeoutError:
            raise Unavailable(f"model {name!r}: the models in its place are in use for {self._wait:g} s") from None
        raise Unavailable(f"model {name!r}: nobody waits for it any more")

    async def _unload_when_idle(self, model: PooledModel, wanted: Callable[[], bool] = lambda: True) -> None:
        """Wait until a model is idle, and end it; it stays where its place is not `wanted` any more."""
        model.leaving = True
        try:
            while not model.idle:
                if not wanted():
                    return
                await asyncio.sleep(LOOK_SECONDS)
            if model.running is not None:
                logger.info("unloading model %s", model.entry.name)
                model.state = "unloaded"
            self._end(model)
            if model.ending is not None:
                await asyncio.wait({model.ending})
        finally:
            model.leaving = False

    def _end(self, model: PooledModel) -> None:
        """End a model, if it is loaded, in a thread."""
        running, model.running = model.running, None
        if running is not None:
            model.ending = asyncio.create_task(_closed(model.entry.name, running))


def _ignore_result(task: asyncio.Future[Any]) -> None:
    """Take a failure for noted: whoever waited for a load may have left before it failed."""
    if not task.cancelled():
        task.exception()


async def _closed(name: str, running: Running) -> None:
    try:
        await asyncio.to_thread(running.close)
    except Exception:
        logger.exception("model %s did not end well", name)
