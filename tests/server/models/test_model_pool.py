"""Several models that share a budget: who is loaded when, who waits for whom, and that no request is lost."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

import pytest

from quire.core.config import flat_config
from quire.core.errors import ConfigError, EngineFailure, ModelError, Overloaded, QuireError, Unavailable
from quire.server.models.entry import ModelEntry
from quire.server.models.pool import Pool
from several_models import entry


class Model:
    """A loaded model that does nothing."""

    def __init__(self, close_seconds: float = 0.0) -> None:
        self.busy = self.begun = self.closed = False
        self.failure: QuireError | None = None
        self._close_seconds = close_seconds

    def begin(self) -> None:
        self.begun = True

    def close(self) -> None:
        time.sleep(self._close_seconds)
        self.closed = True


def start(_: ModelEntry, __: ExitStack) -> Model:
    return Model()


def turning(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test on an event loop of its own, ended after seconds."""

    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 30))

    run.__name__ = test.__name__
    return run


async def used(pool: Pool, name: str, seconds: float = 0.0) -> Model:
    async with pool.use(name) as running:
        assert isinstance(running, Model) and running.begun and not running.closed
        await asyncio.sleep(seconds)
        assert not running.closed or running.failure is not None
        return running


def states(pool: Pool) -> dict[str, str]:
    return {name: model.state for name, model in pool.models.items()}


async def settled(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


@turning
async def test_alternating_requests_take_turns_within_the_budget() -> None:
    pool, most = Pool([entry("a"), entry("b")], start, budget=1), 0

    async def one(i: int) -> None:
        nonlocal most
        await used(pool, "ab"[i % 2], 0.001)
        most = max(most, sum(model.running is not None for model in pool.models.values()))

    await asyncio.gather(*map(one, range(100)))
    assert most == 1
    assert all(model.loads for model in pool.models.values()) and not any(s.users for s in pool.models.values())


@turning
async def test_the_least_recently_used_makes_room_and_pinned_ones_stay() -> None:
    pool = Pool([entry("a", pinned=True), *map(entry, "bcd")], start, budget=3)
    for name in "abcbd":
        await used(pool, name)
    assert states(pool) == {"a": "loaded", "b": "loaded", "c": "unloaded", "d": "loaded"}
    large = Pool([*map(entry, "abc"), entry("d", needed=2)], start, budget=3)
    for name in "abcad":
        await used(large, name)
    assert states(large) == {"a": "loaded", "b": "unloaded", "c": "unloaded", "d": "loaded"}


@turning
async def test_what_works_for_somebody_stays_until_it_is_done_and_takes_nothing_new() -> None:
    pool = Pool([entry("a"), entry("b")], start, budget=1)
    first = await used(pool, "a")
    first.busy = True  # in the background: no request has it
    other = asyncio.create_task(used(pool, "b"))
    await settled(lambda: pool.models["a"].leaving)
    again = asyncio.create_task(used(pool, "a"))
    await asyncio.sleep(0.05)
    assert not first.closed and not again.done()
    first.busy = False
    await other
    assert first.closed and await again is not first


@turning
async def test_who_leaves_is_not_loaded_for() -> None:
    pool = Pool([*map(entry, "abc")], start, budget=1)
    first = await used(pool, "a")
    first.busy = True
    gone = [asyncio.create_task(used(pool, name)) for name in "bc"]
    await settled(lambda: pool.models["a"].leaving)
    for task in gone:
        task.cancel()
    await settled(lambda: not pool.models["a"].leaving)
    assert await used(pool, "a") is first
    assert not any(pool.models[name].loads or pool.models[name].waiting for name in "bc")


@turning
async def test_a_model_that_cannot_load_says_why_and_is_tried_again_later() -> None:
    tries, cleaned = 0, threading.Event()

    def twice(_: ModelEntry, until: ExitStack) -> Model:
        nonlocal tries
        tries += 1
        until.callback(cleaned.set)
        if tries < 3:
            raise ModelError("config.json: gone") if tries == 1 else ValueError("a defect")
        return Model()

    pool = Pool([entry("a")], twice)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.server.models.pool.FIRST_PAUSE", 100.0)
        for _ in range(3):
            with pytest.raises(Unavailable, match=r"'a' could not be loaded: config\.json: gone; .* in \d+ s") as told:
                await used(pool, "a")
            assert 90 < told.value.retry_after <= 100
        assert tries == 1 and cleaned.is_set() and states(pool) == {"a": "failed"}
        with pytest.raises(Unavailable, match=r"an internal error, ") as told:
            await pool.load("a")
        assert 190 < told.value.retry_after <= 200
    await pool.load("a")
    assert tries == 3 and states(pool) == {"a": "loaded"} and not pool.models["a"].error


@turning
async def test_waiting_is_bounded_in_time_and_in_number() -> None:
    go = threading.Event()

    def slowly(_: ModelEntry, __: ExitStack) -> Model:
        go.wait(5)
        return Model()

    few = entry("a", config=flat_config(max_num_queued_reqs=2))
    pool = Pool([few, entry("b")], slowly, wait=0.1)
    asked = [asyncio.create_task(used(pool, "a")) for _ in range(3)]
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(r) for r in results] == [Unavailable, Unavailable, Overloaded]
    assert "not loaded within 0.1 s" in str(results[0]) and "2 requests wait for it" in str(results[2])
    go.set()
    await settled(lambda: pool.models["a"].state == "loaded")
    one = Pool([entry("a"), entry("b")], start, budget=1, wait=0.1)
    busy = await used(one, "a")
    busy.busy = True
    with pytest.raises(Unavailable):
        await used(one, "b")
    with pytest.raises(Unavailable, match=r"'a' is still in use after 0\.1 s"):
        await one.unload("a")
    assert states(one) == {"a": "loaded", "b": "unloaded"} and await used(one, "a") is busy


@turning
async def test_a_dead_model_harms_no_other_and_counts_until_its_memory_is_free() -> None:
    def slow_to_close(model: ModelEntry, __: ExitStack) -> Model:
        assert all(m.closed or m.failure is None for m in made), "its place is not free yet"
        made.append(Model(close_seconds=0.05))
        return made[-1]

    made: list[Model] = []
    pool = Pool([*map(entry, "abc")], slow_to_close, budget=2)
    a, b = await used(pool, "a"), await used(pool, "b")
    a.failure = EngineFailure("it was killed")
    assert await used(pool, "b") is b
    pool.note_failures()
    assert states(pool) == {"a": "failed", "b": "loaded", "c": "unloaded"} and pool.models["a"].error == "it was killed"
    await used(pool, "c")
    assert a.closed and not b.closed
    with pytest.raises(Unavailable, match="it was killed"):
        await used(pool, "a")
    pool.models["a"].retry_at = 0.0
    assert await used(pool, "a") is not a


@turning
async def test_unloaded_by_hand_it_comes_back_when_asked_for() -> None:
    pool = Pool([entry("a", pinned=True)], start)
    first = await used(pool, "a")
    await pool.unload("a")
    assert first.closed and states(pool) == {"a": "unloaded"}
    await pool.unload("a")
    assert await used(pool, "a") is not first


@turning
async def test_the_end_gives_up_what_is_loading_and_who_waits_is_told() -> None:
    ending = threading.Event()

    def until_given_up(model: ModelEntry, until: ExitStack) -> Model:
        if model.name == "a":
            return Model()
        time.sleep(0.1)  # nothing can be given up yet
        until.callback(ending.set)
        assert ending.wait(10)
        raise EngineFailure("given up")

    pool = Pool([*map(entry, "abc")], until_given_up)
    first = await used(pool, "a")
    waiting = [asyncio.create_task(used(pool, name)) for name in "bbc"]
    await settled(lambda: pool.models["b"].state == "loading")
    await pool.close()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(r, Unavailable) and "shutting down" in r.message for r in results), results
    assert ending.is_set() and first.closed


@pytest.mark.parametrize("seed", range(6))
def test_histories(seed: int) -> None:
    """Random requests, clients that leave, loads that fail and models that die: at no moment does more than the budget
    count, a model that is used stays, and in the end each request was served or told why not."""
    asyncio.run(asyncio.wait_for(_history(random.Random(seed)), 30))


async def _history(rng: random.Random) -> None:
    models = [entry(name, needed=rng.randint(1, 3), pinned=name == "a" and rng.random() < 0.5) for name in "abcdef"]
    budget = rng.randint(6, 9)
    alive: dict[Model, int] = {}

    def started(model: ModelEntry, _: ExitStack) -> Model:
        if rng.random() < 0.1:
            raise ModelError("no luck")
        time.sleep(rng.random() * 0.004)
        made = Model(close_seconds=rng.random() * 0.004)
        alive[made] = model.needed_bytes
        taken = sum(needed for each, needed in list(alive.items()) if not each.closed)
        assert taken <= budget, f"{taken} of {budget}"
        return made

    pool = Pool(models, started, budget=budget, wait=10.0)
    ended: Counter[str] = Counter()

    async def request() -> None:
        await asyncio.sleep(rng.random() * 0.5)
        name = rng.choice("abcdef")
        if rng.random() < 0.3:
            pool.models[name].retry_at = 0.0  # time passes
        try:
            running = await used(pool, name, rng.random() * 0.01)
            if rng.random() < 0.03:
                running.failure = EngineFailure("died")
            ended["served"] += 1
        except Unavailable as error:
            assert "no luck" in error.message or "died" in error.message, error.message
            ended["refused"] += 1

    tasks = [asyncio.create_task(request()) for _ in range(300)]
    for task in rng.sample(tasks, 30):
        asyncio.get_running_loop().call_later(rng.random() * 0.6, task.cancel)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    ended["left"] = sum(isinstance(result, asyncio.CancelledError) for result in results)
    assert not [r for r in results if r is not None and not isinstance(r, asyncio.CancelledError)], results
    assert ended.total() == 300 and ended["served"] > 100 and not any(s.error == INTERNAL for s in pool.models.values())
    assert not any(model.users or model.waiting for model in pool.models.values())
    await pool.close()
    assert all(model.closed for model in alive)


INTERNAL = "an internal error, which the server's log shows"


def test_what_can_never_be_is_refused() -> None:
    for models, message in (
        ([entry("big", 2_000_000_000)], r"--models-memory-gb 1: model 'big' needs 2 GB; raise it"),
        ([entry("a", 6 * 10**8, True), entry("b", 6 * 10**8)], r"'b' needs 0\.6 GB beside 0\.6 GB of pinned"),
        ([entry("a", 6 * 10**8, True), entry("b", 6 * 10**8, True)], r"pinned models need 1\.2 GB"),
        ([entry("a"), entry("a")], r"'a' is there twice"),
        ([entry("a"), _with_adapter("b", "a")], r"'a' is there twice; names of models and adapters"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            Pool(models, start, budget=10**9)
        assert "\n" not in error.value.message


def _with_adapter(name: str, adapter: str) -> ModelEntry:
    return entry(name, config=flat_config(enable_lora=True, lora_modules=(f"{adapter}=folder",)))
