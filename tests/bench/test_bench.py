"""The measures themselves: what they count, on clocks and servers made up for the test."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from paths import PYDOC
from quire import LLM
from quire.bench import offline, serving
from quire.bench.arrivals import due_times
from quire.bench.http import Client, HttpFailure
from quire.bench.loads import LatencyLoad, ServeLoad, ThroughputLoad
from quire.bench.quality import heldout_texts, perplexity, read_questions, windows
from quire.bench.records import Record, from_intended, goodput, latencies, milliseconds, phase_rates, rates
from quire.bench.workload import Length, random_items
from quire.core.errors import ConfigError, Unavailable
from tiny_model import OPTIONS, write_tiny


def test_a_record_counts_as_defined() -> None:
    record = Record(intended=10.0, sent=11.0, chunks=[13.0, 14.0, 16.0], input_tokens=5, output_tokens=5)
    assert (record.ttft, record.e2e, record.late) == (2.0, 5.0, 1.0)
    assert record.tpot == 3.0 / 4
    assert record.gaps == [1.0, 2.0]
    found = latencies([record, Record(intended=0.0, error="no")])
    assert found["ttft"] is not None and found["ttft"]["mean"] == 2000.0
    assert found["itl"] is not None and found["itl"]["p50"] == 1500.0
    late = from_intended([record])
    assert late["ttft"] is not None and late["e2e"] is not None
    assert (late["ttft"]["mean"], late["e2e"]["mean"]) == (3000.0, 6000.0)
    total = rates([record, Record(intended=0.0, error="no")], 2.0)
    assert (total["completed"], total["failed"], total["requests_per_minute"]) == (1, 1, 30.0)
    assert (total["output_tokens_per_s"], total["total_tokens_per_s"]) == (2.5, 5.0)


def test_speeds_of_prompts_and_of_generation() -> None:
    first = [Record(intended=1.0, sent=1.0, chunks=[1.5, 2.5], input_tokens=10, output_tokens=5)]
    second = [
        Record(intended=3.0, sent=3.0, chunks=[3.5, 5.0], input_tokens=10, output_tokens=5),
        Record(intended=3.0, sent=3.0, chunks=[4.0, 5.5], input_tokens=10, output_tokens=5),
    ]
    found = phase_rates([*first, *second, Record(intended=9.0, error="no")])
    assert found == pytest.approx({"prompt_tokens_per_s": 30 / 1.5, "generation_tokens_per_s": 12 / 3.0})
    assert "generation_tokens_per_s" not in phase_rates([Record(1.0, 1.0, [2.0], 4, 1)]), "there was one token"


def test_percentiles_and_nothing() -> None:
    found = milliseconds([i / 1000 for i in range(1, 101)])
    assert found is not None
    assert (found["min"], found["p50"], found["max"]) == (1.0, 50.5, 100.0)
    assert found["p99"] == pytest.approx(99.01)
    assert milliseconds([]) is None


def test_goodput_counts_requests_that_meet_every_target() -> None:
    fast = Record(intended=0.0, sent=0.0, chunks=[0.1, 0.2], output_tokens=2)
    slow = Record(intended=0.0, sent=0.0, chunks=[0.1, 2.0], output_tokens=2)
    failed = Record(intended=0.0, error="no")
    targets = serving.targets_of(("ttft:150", "tpot:150"))
    assert goodput([fast, slow, failed], targets, 2.0) == 0.5
    assert goodput([fast, slow], {"ttft": 150.0}, 2.0) == 1.0


@pytest.mark.parametrize(("text", "low", "high"), [("7", 7, 7), ("3:9", 3, 9)])
def test_lengths(text: str, low: int, high: int) -> None:
    assert Length.parse(text, "input-len") == Length(low, high)


@pytest.mark.parametrize("text", ["", "a", "9:3", "0", "-1:2"])
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--input-len"):
        Length.parse(text, "input-len")


def test_workloads_repeat_and_share_a_prefix() -> None:
    def make(seed: int) -> list[tuple[int, ...]]:
        items = random_items(20, Length(2, 9), Length(1, 4), vocab_size=50, seed=seed, shared_prefix=5)
        assert all(7 <= len(i.prompt) <= 14 and 1 <= i.output_tokens <= 4 for i in items)
        return [i.prompt for i in items]

    assert make(1) == make(1) != make(2)
    assert len({p[:5] for p in make(1)}) == 1
    assert len({p[5:] for p in make(1)}) > 15
    assert all(0 <= t < 50 for p in make(1) for t in p)


def test_arrivals_have_the_rate_and_the_burstiness() -> None:
    assert due_times(ServeLoad(), 3) == [0.0, 0.0, 0.0]

    def spread(burstiness: float) -> tuple[float, float]:
        due = due_times(ServeLoad(request_rate=50.0, burstiness=burstiness, seed=3), 20_001)
        gaps = [b - a for a, b in itertools.pairwise(due)]
        mean = sum(gaps) / len(gaps)
        return mean, (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5 / mean

    for burstiness in (0.25, 1.0, 4.0):
        mean, variation = spread(burstiness)
        assert mean == pytest.approx(1 / 50, rel=0.05)
        assert variation == pytest.approx(burstiness**-0.5, rel=0.05), "a gamma distribution's coefficient of variation"


@pytest.mark.parametrize(("length", "size"), [(1, 8), (2, 8), (8, 8), (9, 8), (100, 8), (17, 7), (5, 2)])
def test_windows_score_every_token_once(length: int, size: int) -> None:
    found = list(windows(length, size))
    scored = [at for w in found for at in range(w.scored, w.stop)]
    assert scored == list(range(1, length))
    assert all(w.start < w.scored and w.stop - w.start <= size for w in found)
    assert all(w.scored - w.start >= size // 2 for w in found[1:]), "half a window of context"


def test_the_embedded_questions_and_heldout_modules_can_be_read() -> None:
    folder = PYDOC
    assert len(read_questions(folder)) == 4000
    texts = heldout_texts(folder)
    assert "graphlib" in texts and "class TopologicalSorter" in texts["graphlib"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def test_perplexity_does_not_depend_on_the_batch_and_is_that_of_the_logprobs(folder: Path) -> None:
    texts = {"a": "hello world, " * 15, "b": "short"}
    with LLM(folder, **OPTIONS) as llm:
        whole = perplexity(llm, texts)
        assert whole["tokens"] == 194 + 4
        parts = [perplexity(llm, {k: v}) for k, v in texts.items()]
    total = sum(math.log(p["perplexity"]) * p["tokens"] for p in parts)
    assert math.log(whole["perplexity"]) == pytest.approx(total / whole["tokens"], rel=1e-5)
    assert whole["bits_per_byte"] == pytest.approx(total / math.log(2) / whole["bytes"], rel=1e-5)


def test_throughput_counts_tokens_and_waste(folder: Path) -> None:
    load = ThroughputLoad(num_prompts=6, input_len="3:9", output_len="2:6", shared_prefix=4)
    with LLM(folder, **OPTIONS, block_size=4) as llm:
        found = offline.throughput(llm.engine, load, seed=1)
    items = random_items(6, Length(3, 9), Length(2, 6), vocab_size=260, seed=1, shared_prefix=4)
    assert found["rates"]["input_tokens"] == sum(len(i.prompt) for i in items)
    assert found["rates"]["output_tokens"] == sum(i.output_tokens for i in items)
    assert found["rates"]["completed"] == 6
    waste = found["kv_waste"]
    assert 0 <= waste["paged"]["mean"] < waste["contiguous_request"]["max"] < waste["contiguous_max_model_len"]["mean"]
    assert waste["contiguous_max_model_len"]["max"] <= 1 - 4 / 128


def test_static_batching_takes_more_steps(folder: Path) -> None:
    load = ThroughputLoad(num_prompts=12, input_len="4", output_len="1:16")
    steps = {}
    for static in (False, True):
        with LLM(folder, **OPTIONS, max_num_seqs=4, static_batching=static) as llm:
            steps[static] = offline.throughput(llm.engine, load, seed=1)["engine"]["steps"]
    assert steps[True] > steps[False]


def test_latency_measures_after_the_warmup(folder: Path) -> None:
    load = LatencyLoad(batch_size=2, input_len="5", output_len="3", warmup=1, iters=2)
    with LLM(folder, **OPTIONS) as llm:
        found = offline.latency(llm.engine, load, seed=0)
    assert found["rates"]["completed"] == 4
    assert found["rates"]["output_tokens"] == 12
    assert all(found["latency_ms"][name]["mean"] > 0 for name in ("ttft", "tpot", "itl", "e2e"))


Reply = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(reply: Reply) -> AsyncIterator[str]:
    """A server that hands the head and body of every request to `reply`."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((int(h[15:]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length:")), 0)
        await reply(head + await reader.readexactly(length), writer)
        await writer.drain()
        writer.close()

    made = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with made:
        yield f"http://127.0.0.1:{made.sockets[0].getsockname()[1]}"


def chunked(*parts: bytes) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in parts)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


def test_events_survive_any_cut_into_chunks() -> None:
    stream = b'data: {"a": 1}\n\ndata: {"a": 2}\n\n: comment\n\ndata: [DONE]\n\n'

    async def read(size: int) -> list[dict[str, int]]:
        async def reply(_: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(chunked(*(stream[i : i + size] for i in range(0, len(stream), size))))

        async with server(reply) as url:
            return [event async for event in Client(url).events("/x", {})]

    for size in (1, 7, 1000):
        assert asyncio.run(read(size)) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (b'HTTP/1.1 429 No\r\nContent-Length: 33\r\n\r\n{"error": {"message": "is full"}}', "HTTP 429"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 4\r\n\r\noops", "oops"),
        (chunked(b'data: {"error": {"message": "died"}}\n\n'), "died"),
        (chunked(b'data: {"a": 1}\n\n'), r"without \[DONE\]"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "malformed"),
        (b"", "malformed"),
    ],
)
def test_what_a_server_does_wrong_is_an_error(response: bytes, message: str) -> None:
    async def read() -> None:
        async def reply(_: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(response)

        async with server(reply) as url:
            async for _ in Client(url).events("/x", {}):
                pass

    with pytest.raises(HttpFailure, match=message):
        asyncio.run(read())


def test_nobody_listening() -> None:
    with pytest.raises(Unavailable, match="is the server up"):
        asyncio.run(Client("http://127.0.0.1:9").get("/v1/models"))


def test_load_on_a_server_counts_its_chunks_and_waits() -> None:
    """A server that takes 20 ms per request, asked by 6 at once of which 2 may be in flight."""
    seen: list[dict[str, object]] = []
    flying = most = 0

    async def reply(request: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal flying, most
        head, _, body = request.partition(b"\r\n\r\n")
        if head.startswith(b"GET /v1/models "):
            writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 24\r\n\r\n{"data":[{"id":"tiny"}]}')
            return
        assert b"Authorization: Bearer secret" in head
        asked = json.loads(body)
        seen.append(asked)
        flying += 1
        most = max(most, flying)
        await asyncio.sleep(0.02)
        flying -= 1
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": asked["max_tokens"]}
        events = [{"choices": [{"text": "x"}]}] * 2 + [{"choices": [], "usage": usage}]
        writer.write(chunked(*(b"data: %s\n\n" % json.dumps(e).encode() for e in events), b"data: [DONE]\n\n"))

    async def measure() -> dict[str, Any]:
        async with server(reply) as url:
            load = ServeLoad(
                base_url=url, api_key="secret", num_prompts=6, max_concurrency=2, warmup=1,
                input_len="3", output_len="4", goodput=("ttft:10000",),
            )  # fmt: skip
            return await serving.run(load)

    found = asyncio.run(measure())
    assert (len(seen), most) == (7, 2)
    assert all(a["model"] == "tiny" and a["ignore_eos"] and a["stream"] for a in seen)
    assert (found["rates"]["completed"], found["rates"]["input_tokens"], found["rates"]["output_tokens"]) == (6, 18, 24)
    assert found["rates"]["goodput_requests_per_s"] == pytest.approx(found["rates"]["requests_per_minute"] / 60)
    assert found["from_intended_ms"]["ttft"]["max"] > 55, "the third pair waited for two others"
    assert found["latency_ms"]["ttft"]["mean"] < found["from_intended_ms"]["ttft"]["mean"]
