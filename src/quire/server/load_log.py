"""The line that a server logs every ten seconds while it has work: requests, tokens a second, the KV cache."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from quire.server.models.state import ModelServer
from quire.server.service import Service

logger = logging.getLogger("quire.load")
EVERY_SECONDS = 10.0


@dataclass(frozen=True)
class Moment:
    """Totals of all engines at `when`, a monotonic time in seconds; `used` and `blocks` are of the KV cache."""

    when: float
    running: int = 0
    waiting: int = 0
    read: int = 0
    written: int = 0
    used: int = 0
    blocks: int = 0
    queries: int = 0
    hits: int = 0

    @classmethod
    def of(cls, services: Iterable[Service], when: float) -> Moment:
        """The totals now."""
        stats = [service.engine.metrics.steps.stats for service in services]
        return cls(
            when,
            running=sum(each.running for each in stats),
            waiting=sum(each.waiting for each in stats),
            read=sum(each.prompt_tokens for each in stats),
            written=sum(each.generation_tokens for each in stats),
            used=sum(each.used_blocks for each in stats),
            blocks=sum(each.total_blocks for each in stats),
            queries=sum(each.prefix_queries for each in stats),
            hits=sum(each.prefix_hits for each in stats),
        )


def line(before: Moment, now: Moment) -> str:
    """What happened between two moments, as one line; "" where nothing did."""
    seconds = max(now.when - before.when, 1e-9)
    read, written = max(0, now.read - before.read), max(0, now.written - before.written)
    if not (now.running or now.waiting or read or written):
        return ""
    queries, hits = now.queries - before.queries, now.hits - before.hits
    prefix = f", {hits / queries:.0%} of prompts from the prefix cache" if queries > 0 else ""
    return (
        f"{now.running} requests running, {now.waiting} waiting; {read / seconds:,.0f} tokens/s in, "
        f"{written / seconds:,.0f} tokens/s out; KV cache {now.used / max(1, now.blocks):.0%} used{prefix}"
    )


async def log_load(server: ModelServer) -> None:
    """Log the line every `EVERY_SECONDS` in which there was work, until cancelled."""
    before = Moment.of(server.loaded, time.monotonic())
    while True:
        await asyncio.sleep(EVERY_SECONDS)
        now = Moment.of(server.loaded, time.monotonic())
        if told := line(before, now):
            logger.info("%s", told)
        before = now
