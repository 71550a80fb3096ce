"""The vectors of pooled requests: made from the hidden rows of their chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.core.blame import of_request
from quire.core.plan import Chunk, ChunkResult, LogitRow
from quire.features.pooling.plan_pooling import TakenRows
from quire.sample.sampler import NUMERICS


@dataclass(slots=True)
class HiddenSum(TakenRows):
    """The first `rows` rows of a sequence, added in order in f64: how they came in chunks changes no bit."""

    total: NDArray[np.float64]


@dataclass(slots=True)
class HiddenRows(TakenRows):
    """The first `rows` rows of a sequence, as they came in chunks."""

    parts: list[NDArray[np.float32]]


def add_vectors(
    chunks: Sequence[Chunk], rows: Sequence[LogitRow], hidden: NDArray[np.float32], results: Sequence[ChunkResult]
) -> int:
    """Take the `rows` of pooled requests, `hidden` [rows, hidden] in their order, and give `results` the vectors of
    prompts that are done. Rows are checked as logits are: returns how many chunks had inf or NaN."""
    at = wrong = 0
    for chunk, result in zip(chunks, results, strict=True):
        first = at
        while at < len(rows) and rows[at].seq is chunk.seq:
            at += 1
        if at == first:
            continue
        own = hidden[first:at]
        if not np.isfinite(own).all():
            result.error = NUMERICS
            wrong += 1
            continue
        try:
            result.pooled, result.finite = gather(chunk, own), True
        except BaseException as error:
            result.error = of_request(error, "pooling")
    return wrong


def gather(chunk: Chunk, hidden: NDArray[np.float32]) -> bytes:
    """Take the rows [n, hidden] of a chunk; the vector as f32 bytes once the prompt is done, b"" before.

    Rows that were taken before a preemption come again with the same bits, and are passed over.
    """
    seq, end = chunk.seq, chunk.start + chunk.count
    kind, first = seq.request.pooling, end - len(hidden)
    if kind == "mean":
        taken = seq.pooled if isinstance(seq.pooled, HiddenSum) else None
        fresh = hidden if taken is None else np.vstack((taken.total, hidden[max(0, taken.rows - first) :]))
        # Widened row by row within the sum, which takes a fifteenth of the time of a widened copy.
        total = np.add.reduce(fresh, axis=0, dtype=np.float64)
        seq.pooled = HiddenSum(end if taken is None else max(taken.rows, end), total)
    elif kind == "all":
        held = seq.pooled if isinstance(seq.pooled, HiddenRows) else HiddenRows(0, [])
        fresh_rows = hidden[max(0, held.rows - first) :].copy()
        seq.pooled = HiddenRows(max(held.rows, end), [*held.parts, fresh_rows])
    elif kind == "cls" and first == 0 and seq.pooled is None:
        seq.pooled = hidden[0].tobytes()
    if end < seq.prompt_len:
        return b""
    if isinstance(seq.pooled, HiddenSum):
        return bytes((seq.pooled.total / seq.pooled.rows).astype(np.float32).tobytes())
    if isinstance(seq.pooled, HiddenRows):
        return b"".join(part.tobytes() for part in seq.pooled.parts)
    return seq.pooled if isinstance(seq.pooled, bytes) else bytes(hidden[-1].tobytes())
