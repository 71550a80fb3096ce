"""`AsyncEngine`: streams that merge, requests that end, places that are given back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from quire.core.config import SchedulerConfig
from quire.core.errors import BadRequest, EngineFailure, Overloaded, Unavailable
from quire.core.params import SamplingParams
from quire.core.request import Output, Request
from quire.engine.client import EngineClient, StepReport
from quire.engine.frontend import streams
from quire.engine.frontend.async_engine import PORTION, AsyncEngine
from quire.engine.frontend.engine_metrics import buckets_125
from quire.engine.frontend.streams import AT_ONCE, TURN_SECONDS, CallQueue
from quire.engine.processes.supervisor import RestartPolicy, SupervisedEngine
from quire.engine.stats import Stats
from stub_engine import StubEngine, expected, stub_info


def request(name: str, **params: object) -> Request:
    return Request(
        id=name,
        prompt=(1, 2, 3),
        params=SamplingParams(**params),  # type: ignore[arg-type]
        seed=7,
        arrival=time.monotonic(),
        eos_token_ids=(4,),
    )


def run(
    body: Callable[[AsyncEngine, StubEngine], Awaitable[None]],
    stub: StubEngine | None = None,
    client: EngineClient | None = None,
) -> None:
    """Run a coroutine with an engine that is closed after it, and must then owe nobody anything.

    `client`: what stands between the edge and the stub, if anything does.
    """
    stub = stub or StubEngine()

    async def main() -> None:
        engine = AsyncEngine(client or stub)
        try:
            await asyncio.wait_for(body(engine, stub), 10.0)
            assert engine.in_flight == 0 and not engine._streams and engine.admission.prompt_tokens == 0
        finally:
            engine.close()

    asyncio.run(main())
    assert stub.closed == 1


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def test_generate_gives_all_tokens_of_all_sequences() -> None:
    async def body(engine: AsyncEngine, stub: StubEngine) -> None:
        wanted = request("a", n=3, max_tokens=20)
        got: dict[int, list[int]] = {0: [], 1: [], 2: []}
        ends = []
        async for output in engine.generate(wanted):
            got[output.index] += output.tokens
            ends += [output.index] * (output.finish_reason is not None)
        assert got == {i: expected(wanted, i) for i in range(3)} and sorted(ends) == [0, 1, 2]
        assert stub.aborted == []

    run(body)


def test_leaving_the_iteration_aborts() -> None:
    async def body(engine: AsyncEngine, stub: StubEngine) -> None:
        outputs = engine.generate(request("left", max_tokens=1000))
        await anext(outputs)
        await outputs.aclose()  # type: ignore[attr-defined]

        async def read() -> None:
            async for _ in engine.generate(request("cancelled", max_tokens=1000)):
                pass

        task = asyncio.create_task(read())
        await until(lambda: engine.in_flight == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stub.aborted == ["left", "cancelled"] and stub.running == 0

    run(body, StubEngine(step_seconds=0.005))


def test_unread_outputs_merge_into_one_per_sequence() -> None:
    async def body(engine: AsyncEngine, stub: StubEngine) -> None:
        wanted = request("slow", n=2, max_tokens=100, logprobs=1)
        stream = engine.submit([wanted])
        await until(lambda: stub.running == 0)
        await asyncio.sleep(0.05)
        assert len(stream._pending) == 2
        outputs = await stream.next()
        assert sorted((o.index, tuple(o.tokens)) for o in outputs) == [(i, tuple(expected(wanted, i))) for i in (0, 1)]
        assert all(len(o.logprobs) == 100 and o.finish_reason == "length" and o.timing for o in outputs)
        assert await stream.next() == []

    run(body)


def test_a_request_that_nobody_reads_is_paused_and_goes_on_behind_what_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "UNREAD", 8 << 10)
    stub = StubEngine(stub_info(max_model_len=1 << 20), step_seconds=0.001)

    async def body(engine: AsyncEngine, _: StubEngine) -> None:
        slow, scored = request("slow", n=2, max_tokens=300), request("scored", max_tokens=30, logprobs=20)
        asked = {r.id: engine.submit([r]) for r in (slow, scored)}
        await until(lambda: stub.running == 0)
        assert engine._paused == {"slow", "scored"} and engine.metrics.steps.paused == 2
        await asyncio.sleep(0.05)
        assert all(streams.UNREAD < stream._unread[name] < 2 * streams.UNREAD for name, stream in asked.items())
        engine._progress -= 1000
        assert engine.stalled_seconds == 0 and engine.in_flight == 3
        got: dict[tuple[str, int], list[int]] = {}
        for stream in asked.values():
            while outputs := await stream.next():
                for output in outputs:
                    got.setdefault((output.request_id, output.index), []).extend(output.tokens)
        assert got == {(r.id, i): expected(r, i) for r in (slow, scored) for i in range(r.params.n)}
        assert not engine._paused and engine.metrics.steps.paused == 0
        left = engine.submit([request("left", max_tokens=5000)])
        await until(lambda: "left" in engine._paused)
        left.close()

    run(body, stub, SupervisedEngine(lambda *_: stub, RestartPolicy(), SchedulerConfig()))


def test_merge_keeps_everything() -> None:
    old = Output(request_id="a", tokens=[1], cached_tokens=5)
    old.merge(Output(request_id="a", tokens=[2], drafted=4, accepted=1))
    old.merge(Output(request_id="a", tokens=[3], finish_reason="stop", stop_token=3))
    assert (old.drafted, old.accepted) == (4, 1)
    assert old.tokens == [1, 2, 3] and old.finish_reason == "stop" and old.stop_token == 3 and old.cached_tokens == 5


def test_admission_is_all_or_nothing_and_places_come_back() -> None:
    async def body(engine: AsyncEngine, stub: StubEngine) -> None:
        with pytest.raises(BadRequest, match=r"n: .* 5 sequences"):
            engine.submit([request("huge", n=5)])
        first = engine.submit([request("a", n=2), request("b")])
        with pytest.raises(Overloaded) as refused:
            engine.submit([request("c"), request("d")])
        assert refused.value.retry_after >= 1 and [r.id for r in stub.submitted] == ["a", "b"]
        second = engine.submit([request("e")])
        first.close()
        assert engine.in_flight == 1 and sorted(stub.aborted) == ["a", "b"]
        engine.submit([request("f", n=3)]).close()
        second.close()
        second.close()

    stub = StubEngine(stub_info(max_num_queued_reqs=4))
    stub.paused = True
    run(body, stub)


def test_a_submit_that_fails_half_way_leaves_nothing() -> None:
    class Failing(StubEngine):
        def submit(self, request: Request) -> None:
            if request.id == "b":
                raise EngineFailure("gone")
            super().submit(request)

    async def body(engine: AsyncEngine, stub: StubEngine) -> None:
        with pytest.raises(EngineFailure):
            engine.submit([request("a", max_tokens=1000), request("b")])
        assert "a" in stub.aborted

    run(body, Failing(step_seconds=0.005))


def test_death_reaches_every_reader_after_the_tokens_that_came_before() -> None:
    async def body(engine: AsyncEngine, stub: StubEngine) -> None:
        streams = [engine.submit([request(f"r{i}", max_tokens=1000)]) for i in range(5)]
        for stream in streams:
            assert (await stream.next())[0].tokens
        stub.dead = True
        await until(lambda: not engine.healthy)
        for stream in streams:
            with pytest.raises(EngineFailure, match="the engine failed"):
                while await stream.next():
                    pass
        assert "told to die" in str(engine.failure)
        with pytest.raises(Unavailable):
            engine.submit([request("late")])

    run(body, StubEngine(step_seconds=0.002))


def test_an_unexpected_error_of_the_reader_is_a_death_too() -> None:
    class Broken(StubEngine):
        def poll(self, timeout: float) -> None:
            raise KeyError("broken")

    async def body(engine: AsyncEngine, stub: StubEngine) -> None:
        stream = engine.submit([request("a")])
        with pytest.raises(EngineFailure, match="the engine failed"):
            await stream.next()

    run(body, Broken())


def test_one_bad_request_does_not_touch_the_others() -> None:
    async def body(engine: AsyncEngine, stub: StubEngine) -> None:
        stub.poison = 50
        good, bad = request("good", max_tokens=20), request("bad", max_tokens=100)
        one, two = engine.submit([good]), engine.submit([bad])
        tokens: list[int] = []
        while outputs := await one.next():
            tokens += [t for o in outputs for t in o.tokens]
        assert tokens == expected(good)
        with pytest.raises(EngineFailure, match="NaN"):
            while await two.next():
                pass
        assert engine.healthy

    run(body)


def test_buckets() -> None:
    assert buckets_125(256) == (1, 2, 5, 10, 20, 50, 100, 200)
    assert buckets_125(1000) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    assert buckets_125(0) == (1,)


def test_the_loop_looks_around_while_thousands_go_on() -> None:
    """However many wait for their turn, what does not wait is called between turns; the order is that of arrival."""

    async def main() -> None:
        turns, done, between = CallQueue(), list[int](), list[int]()
        for i in range(100 * AT_ONCE):
            turns.later(partial(done.append, i))
        while len(done) < 100 * AT_ONCE:
            before = len(done)
            await asyncio.sleep(0)
            between.append(len(done) - before)
        assert done == sorted(done) and max(between) <= AT_ONCE and len(between) >= 100
        turns.later(partial(done.append, -1))  # it has come to rest, and begins again
        await turns.mine()
        assert done[-1] == -1

    asyncio.run(main())


def test_a_turn_that_fails_keeps_nobody_waiting() -> None:
    async def main() -> None:
        said: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(str(context["exception"])))
        turns, done = CallQueue(), list[int]()
        for i in range(3):
            turns.later(partial(done.append, i) if i != 1 else partial(int, "no number"))
        await turns.mine()
        assert done == [0, 2] and len(said) == 1 and "no number" in said[0]

    asyncio.run(main())


def test_a_long_turn_lets_the_loop_look_around() -> None:
    async def main() -> None:
        turns, done = CallQueue(), list[int]()

        def long(i: int) -> None:
            time.sleep(2 * TURN_SECONDS)
            done.append(i)

        for i in range(3):
            turns.later(partial(long, i))
        await asyncio.sleep(0)
        assert done == [0]
        await turns.mine()
        assert done == [0, 1, 2]

    asyncio.run(main())


def test_tokens_come_before_the_end_of_their_engine() -> None:
    """Portions of a large report, then a failure: every stream has its tokens, and then the error."""

    async def body(engine: AsyncEngine, stub: StubEngine) -> None:
        stub.paused = True
        requests = [request(f"r{i}", max_tokens=5) for i in range(3 * PORTION)]
        streams = [engine.submit([each]) for each in requests]
        outputs = [Output(request_id=each.id, tokens=[9]) for each in requests]
        engine._deliver(StepReport(outputs, Stats()))
        engine._die(EngineFailure("gone"))
        for stream in streams:
            assert [o.tokens[0] for o in await stream.next()] == [9]
            with pytest.raises(EngineFailure):
                await stream.next()
            stream.close()

    run(body, StubEngine(stub_info(max_num_queued_reqs=10_000)))
