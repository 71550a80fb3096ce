"""Load on a running server over HTTP: when requests are due, when they are sent, when their tokens come."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable
from typing import Any

from quire.bench.http import Client
from quire.bench.loads import ServeLoad
from quire.bench.records import Record, from_intended, goodput, latencies, rates
from quire.bench.workload import Item, Length, random_items
from quire.core.errors import ConfigError, QuireError
from quire.engine.life.progress import counting_bar


def targets_of(texts: tuple[str, ...]) -> dict[str, float]:
    """{"ttft": 200.0} from ("ttft:200",)."""
    found = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            found[name] = float(limit)
        except ValueError:
            raise ConfigError(f"--goodput {text!r} is not like ttft:200 (milliseconds)") from None
        if name not in ("ttft", "tpot", "e2e"):
            raise ConfigError(f"--goodput {text!r}: known are ttft, tpot and e2e")
    return found


def due_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start at which `count` requests are due: gamma-distributed gaps of mean 1 / rate."""
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    gaps = (rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count - 1))
    return list(itertools.accumulate(gaps, initial=0.0))


async def _send(client: Client, model: str, item: Item, ignore_eos: bool, record: Record) -> None:
    """One streamed completion; what goes wrong is noted in the record."""
    body = {
        "model": model,
        "prompt": list(item.prompt),
        "max_tokens": item.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if ignore_eos else {}),
    }
    record.sent = time.perf_counter()
    try:
        async for event in client.events("/v1/completions", body):
            if event["choices"]:
                record.chunks.append(time.perf_counter())
            if event.get("usage"):
                record.input_tokens = event["usage"]["prompt_tokens"]
                record.output_tokens = event["usage"]["completion_tokens"]
    except (QuireError, KeyError) as error:
        record.error = f"{type(error).__name__}: {error}"


async def run(load: ServeLoad, on_done: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Send everything and measure; `on_done` is called after each request. `Unavailable` when nobody answers."""
    targets = targets_of(load.goodput)
    client = Client(load.base_url, load.api_key or None)
    model = load.model or (await client.get("/v1/models"))["data"][0]["id"]
    inputs, outputs = Length.parse(load.input_len, "input-len"), Length.parse(load.output_len, "output-len")
    items = random_items(
        load.warmup + load.num_prompts,
        inputs,
        outputs,
        vocab_size=load.vocab_size,
        seed=load.seed,
        shared_prefix=load.shared_prefix,
    )
    for item in items[: load.warmup]:
        await _send(client, model, item, load.ignore_eos, Record(intended=0.0))
    due = due_times(load.num_prompts, load.request_rate, load.burstiness, load.seed)
    limit = asyncio.Semaphore(load.max_concurrency or load.num_prompts)
    start = time.perf_counter()
    records = [Record(intended=start + at) for at in due]
    with counting_bar(load.num_prompts, "requests") as count:

        async def one(item: Item, record: Record) -> None:
            await asyncio.sleep(record.intended - time.perf_counter())
            async with limit:
                await _send(client, model, item, load.ignore_eos, record)
            count()
            on_done()

        await asyncio.gather(*(one(*pair) for pair in zip(items[load.warmup :], records, strict=True)))
    seconds = time.perf_counter() - start
    return _result(records, targets, seconds)


def _result(records: list[Record], targets: dict[str, float], seconds: float) -> dict[str, Any]:
    good = {"goodput_requests_per_s": goodput(records, targets, seconds)} if targets else {}
    return {
        "rates": rates(records, seconds) | good,
        "latency_ms": latencies(records),
        "from_intended_ms": from_intended(records),
        "errors": sorted({r.error for r in records if r.error})[:5],
    }
