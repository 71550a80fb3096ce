"""What pooled requests plan: which rows of their chunks they want, and when they end."""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.plan import Chunk, ChunkResult
from quire.core.request import FinishReason, Output, Request
from quire.core.sequence import Sequence
from quire.features.feature import SchedulerFeature


@dataclass(slots=True)
class TakenRows:
    """How many rows of a sequence, its first ones, are in what is kept of them."""

    rows: int


class PoolingFeature(SchedulerFeature):
    """Requests that want a vector of their prompts' hidden rows, and end with that."""

    def concerns(self, request: Request) -> bool:
        """One that wants a vector."""
        return request.pooling is not None

    def logits(self, seq: Sequence, count: int) -> int:
        """Rows whose hidden values it wants."""
        return rows_wanted(seq, count)


def finish(chunk: Chunk, result: ChunkResult, output: Output, now: float) -> FinishReason | None:
    """Take what a step found for a pooled request, and end it with its vector once the prompt is done."""
    seq = chunk.seq
    output.pooled = result.pooled
    if not output.pooled:
        return None
    seq.times.first_token = seq.times.last_token = now
    seq.in_flight -= 1
    output.miss, output.preemptions = seq.kv.miss, seq.times.preemptions
    return "stop"


def rows_wanted(seq: Sequence, count: int) -> int:
    """How many of the last rows of a chunk of `count` tokens that begins at `seq.computed` a pooled request wants,
    beside that of its end: all for a mean, for weights and for all, and to have the first one."""
    kind = seq.request.pooling
    done = seq.pooled.rows if isinstance(seq.pooled, TakenRows) else 0
    wants = kind in ("mean", "all", "splade") and seq.computed + count > done
    return count if wants or (kind == "cls" and seq.computed == 0 and seq.pooled is None) else 0
