"""Two clocks joined: on clocks made up for the test, and between a client and a server that share this machine's."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from live_server import live
from quire.bench import serving
from quire.bench.clocks import PARTS, Sample, best, join, parts, sample
from quire.bench.loads import ServeLoad
from quire.bench.records import Moments, Record
from stub_engine import StubEngine


def pretended(sent: float, there: float, back: float, ahead: float) -> Record:
    """Sent at `sent`, on its way for `there` and `back` seconds; the server's clock is `ahead`. A second in all."""
    received = sent + there
    first, last = received + 0.5, received + 0.9
    heard = last + 0.1 + back
    found = Record(intended=sent - 0.25, sent=sent, ready=sent - 0.05, chunks=[first + back, heard], output_tokens=5)
    told = (received, received + 0.2, first, last, last + 0.1)
    found.moments = Moments(heard, *(at + ahead for at in told))
    return found


def test_equal_ways_give_the_offset_exactly() -> None:
    record = pretended(100.0, 0.01, 0.01, ahead=5000.0)
    assert record.moments is not None
    found = sample(record, record.moments)
    assert found.offset == pytest.approx(5000.0) and found.trip == pytest.approx(0.02)
    part = parts(record, record.moments, found.offset)
    assert part is not None and tuple(part) == PARTS
    wanted = {
        "wait": 0.2, "client": 0.05, "way there": 0.01, "queue": 0.2, "prefill": 0.3, "way back": 0.01, "decode": 0.4,
        "tail": 0.11,
    }  # fmt: skip
    assert part == pytest.approx(wanted)
    until_first = sum(part[name] for name in PARTS[:6])
    assert until_first == pytest.approx(record.ttft + record.late)


def test_the_least_round_trip_wins_and_ttft_is_whole_whatever_is_believed() -> None:
    rng = random.Random(1)
    records = [pretended(float(i), rng.uniform(0.01, 0.5), rng.uniform(0.01, 0.5), ahead=-7.0) for i in range(20)]
    records[11] = pretended(11.0, 0.001, 0.002, ahead=-7.0)
    found = join(records)
    assert found is not None
    assert found.offset == pytest.approx(-7.0, abs=0.0006), "wrong by half of what the ways differ"
    for record, part in found.found:
        assert sum(part[name] for name in PARTS[:6]) == pytest.approx(record.ttft + record.late)
    told = found.results()
    assert told["requests"] == 20 and told["least_round_trip_ms"] == pytest.approx(3.0)
    slowest = max(records, key=lambda r: r.ttft + r.late)
    until_first = sum(told["slowest_mean_ms"][name] for name in PARTS[:6])
    assert until_first == pytest.approx(1e3 * (slowest.ttft + slowest.late))


def test_each_request_is_told_by_its_own_time() -> None:
    """A clock that drifts: the sliding minimum is that of each window, found the slow way."""
    rng = random.Random(2)
    samples = [Sample(i * 0.7, i * 1e-4, rng.random()) for i in range(200)]
    found = best(samples, window=5.0)
    for each, chosen in zip(samples, found, strict=True):
        near = [s for s in samples if abs(s.at - each.at) <= 5.0]
        assert chosen.trip == min(s.trip for s in near)


def test_requests_without_an_account_are_left_out() -> None:
    plain = Record(intended=0.0, chunks=[1.0], output_tokens=1)
    failed = pretended(0.0, 0.1, 0.1, 0.0)
    failed.error = "no"
    assert join([plain, failed]) is None
    begun = pretended(0.0, 0.1, 0.1, 0.0)
    assert begun.moments is not None
    begun.moments.admitted = None
    assert join([begun]) is None


def test_a_server_on_this_machine_has_this_clock() -> None:
    """Both clocks are the machine's monotonic one: the offset must come out as none, and the parts as what happened."""
    assert min(abs(time.perf_counter() - time.monotonic()) for _ in range(20)) < 1e-3, "else they cannot be compared"
    with live(StubEngine(step_seconds=0.02)) as server:
        load = ServeLoad(base_url=server.url, num_prompts=12, input_len="8", output_len="4", max_concurrency=2)
        measured = asyncio.run(serving.measure(load))
        assert [r.error for r in measured.records] == [None] * 12
        found = measured.joined()
        assert found is not None and len(found.found) == 12
        assert abs(found.offset) <= found.trip / 2
        metrics = measured.metrics()
        assert metrics["decode_ms_p50"] >= 3 * 20 * 0.9
        assert {"queue_ms_p99", "prefill_ms_mean", "network_ms_p50", "client_ms_p99"} <= set(metrics)
        load = ServeLoad(base_url=server.url, num_prompts=2, clocks="off", output_len="4")
        silent = asyncio.run(serving.measure(load))
        assert silent.joined() is None and "queue_ms_p50" not in silent.metrics()


def test_a_reply_says_when_each_thing_was() -> None:
    with live(StubEngine(step_seconds=0.002)) as server:
        before = time.monotonic()
        found = server.complete([9, 9], max_tokens=3, quire={"clock": True})["quire"]
        assert set(found) == {"request_id", "id", "clock"}
        clock = found["clock"]
        order = [clock[name] for name in ("received", "admitted", "first_token", "last_token", "told")]
        assert order == sorted(order) and before <= order[0] and order[-1] <= time.monotonic()
        several = server.complete([[9], [8, 8]], max_tokens=2, quire={"clock": True})["quire"]["prompts"]
        assert len(several) == 2 and all(each["clock"]["first_token"] for each in several)
