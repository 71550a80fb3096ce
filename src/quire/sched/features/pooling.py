"""What pooled requests plan, and their vectors: made from the hidden rows of their chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.core.plan import Chunk, ChunkResult
from quire.core.request import FinishReason, Output, Request
from quire.core.sequence import Sequence
from quire.sched.features.feature import SchedulerFeature


@dataclass(slots=True)
class HiddenSum:
    """The first `rows` rows of a sequence, added in order in f64: how they came in chunks changes no bit."""

    total: NDArray[np.float64]
    rows: int = 0


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
    output.pooled = b"" if result.hidden is None else gather(chunk, result.hidden)
    if not output.pooled:
        return None
    seq.times.first_token = seq.times.last_token = now
    seq.in_flight -= 1
    output.miss, output.preemptions = seq.kv.miss, seq.times.preemptions
    return "stop"


def rows_wanted(seq: Sequence, count: int) -> int:
    """How many of the last rows of a chunk of `count` tokens that begins at `seq.computed` a pooled request wants,
    beside that of its end: all for a mean, and to have the first one."""
    kind = seq.request.pooling
    done = seq.pooled.rows if isinstance(seq.pooled, HiddenSum) else 0
    wants = kind == "mean" and seq.computed + count > done
    return count if wants or (kind == "cls" and seq.computed == 0 and seq.pooled is None) else 0


def gather(chunk: Chunk, hidden: NDArray[np.float32]) -> bytes:
    """Take the rows [n, hidden] of a chunk; the vector as f32 bytes once the prompt is done, b"" before.

    Rows that were taken before a preemption come again with the same bits, and are passed over.
    """
    seq, end = chunk.seq, chunk.start + chunk.count
    kind, first = seq.request.pooling, end - len(hidden)
    if kind == "mean":
        taken = seq.pooled if isinstance(seq.pooled, HiddenSum) else HiddenSum(np.zeros(hidden.shape[1]))
        fresh = hidden[max(0, taken.rows - first) :].astype(np.float64)
        seq.pooled = HiddenSum(np.add.reduce(np.vstack((taken.total[None], fresh)), axis=0), max(taken.rows, end))
    elif kind == "cls" and first == 0 and seq.pooled is None:
        seq.pooled = hidden[0].tobytes()
    if end < seq.prompt_len:
        return b""
    if isinstance(seq.pooled, HiddenSum):
        return bytes((seq.pooled.total / seq.pooled.rows).astype(np.float32).tobytes())
    return seq.pooled if isinstance(seq.pooled, bytes) else bytes(hidden[-1].tobytes())
