"""The definitions of the sampling ops, in numpy and float64. They run over rows of logits [R, V] float32, contiguous.

Rows are independent: what happens to one depends on nothing but its logits and its own record.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.ops.arrays import Array
from quire.ops.op import op
from quire.ops.philox import noise

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Records = NDArray[np.void]
Found = Array
"""A result of sampling where the logits are: on a device a tensor, records as bytes, that `Ops.fetch` brings."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy (vLLM's bound): dividing by them would only overflow."""

NOT_FINITE, NOTHING_ALLOWED = 1, 2
"""Flags of a row: NaN or +inf among the logits; every logit is -inf."""

DRAW_FIELDS = (
    ("row", "i4"),
    ("top_k", "i4"),
    ("seed", "u8"),
    ("position", "i8"),
    ("stream", "i8"),
    ("temperature", "f8"),
    ("top_p", "f8"),
    ("min_p", "f8"),
)
DRAW = np.dtype(list(DRAW_FIELDS))
"""One row to sample: top_k 0, top_p 1 and min_p 0 are off; (seed, position, stream) name the random numbers."""
PACK_DRAW = struct.Struct("=iiQqqddd").pack_into
"""Writes a DRAW record into a buffer at an offset; ten times as fast as assigning the fields."""

QUERY = np.dtype([("row", "i4"), ("target", "i4")])
SCORE = np.dtype([("logsumexp", "f8"), ("logprob", "f4"), ("rank", "i4"), ("flags", "i4"), ("pad", "i4")])
"""What is known of a row's target: its log-probability and its 1-based rank (equal logits: lower id first)."""


@dataclass(slots=True)
class RowEdits:
    """Changes to the logits of one row (None: no such change), in this order.

    `mask` [>= V / 32], bit i % 32 of word i / 32 for id i: ids whose bit is 0 become -inf.
    `allowed` [a]: every other id becomes -inf. `banned` [b]: these become -inf. `bias` (ids [m], values [m]): added.
    `seen` (ids [s], counts [s]): the distinct ids of prompt and output, and how often each occurs in the output:
    positive logits are divided by `repetition`, others multiplied by it (Keskar et al. 2019), then frequency * count
    and, where count > 0, presence are subtracted (OpenAI's definition).
    """

    row: int
    allowed: Ints | None = None
    banned: Ints | None = None
    bias: tuple[Ints, Floats] | None = None
    seen: tuple[Ints, Ints] | None = None
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    mask: Ints | None = None


@op(tolerance=1e-6)
def penalize(logits: Array, edits: Sequence[RowEdits]) -> None:
    """Apply `edits` to logits [R, V] in place. NaN and +inf stay what they are, so that `sample` still finds them."""
    for edit in edits:
        x = np.asarray(logits)[edit.row]
        hidden = np.zeros(len(x), bool)
        if edit.mask is not None:
            hidden |= np.unpackbits(edit.mask.view(np.uint8), bitorder="little")[: len(x)] == 0
        if edit.allowed is not None:
            others = np.ones(len(x), bool)
            others[edit.allowed] = False
            hidden |= others
        if edit.banned is not None:
            hidden[edit.banned] = True
        x[hidden & (x < np.inf)] = -np.inf
        if edit.bias is not None:
            ids, values = edit.bias
            x[ids] += values
        if edit.seen is not None:
            ids, counts = edit.seen
            r, f, p = (np.float32(v) for v in (edit.repetition, edit.frequency, edit.presence))
            y = np.where(x[ids] > 0, x[ids] / r, x[ids] * r)
            x[ids] = y - f * counts.astype(np.float32) - np.where(counts > 0, p, np.float32(0))


@op(tolerance=0.0)
def sample(logits: Array, draws: Records) -> tuple[Found, Found]:
    """One token per record of `draws` [n] (DRAW): tokens [n] int32 (-1 where flagged) and flags [n] int32.

    Greedy takes the largest logit, the lowest id among equals. Otherwise, in this order: divide by the temperature;
    keep the top_k largest; keep the smallest set of the largest whose share of what is left reaches top_p (Holtzman et
    al. 2020); keep what has at least min_p of the largest probability (Nguyen et al. 2024); draw by a race: token i
    arrives after an exponential time of mean 1 / weight, made of the number that `noise(seed, position, stream)` gives
    it, and the first is drawn (the Gumbel-max trick). Two models that draw so agree nearly as often as they can:
    Daliri et al. 2024, "Coupling without communication and drafter-invariant speculative decoding". Equal logits: lower
    id first.
    """
    results = [_sample_row(np.asarray(logits[int(d["row"])], np.float64), d) for d in draws]
    tokens, flags = zip(*results, strict=True) if results else ((), ())
    return np.array(tokens, np.int32), np.array(flags, np.int32)


def _flags(x: NDArray[np.float64]) -> int:
    if np.isnan(x).any() or x.max() == np.inf:
        return NOT_FINITE
    return NOTHING_ALLOWED if x.max() == -np.inf else 0


def _sample_row(x: NDArray[np.float64], draw: Any) -> tuple[int, int]:
    if flags := _flags(x):
        return -1, flags
    if draw["temperature"] < GREEDY_BELOW:
        return int(x.argmax()), 0
    weights = np.exp((x - x.max()) / draw["temperature"])
    order = np.lexsort((np.arange(len(x)), -x))
    if 0 < draw["top_k"] < len(x):
        order = order[: draw["top_k"]]
    if draw["top_p"] < 1:
        mass = weights[order].cumsum()
        order = order[: 1 + int(np.searchsorted(mass, draw["top_p"] * mass[-1]))]
    if draw["min_p"] > 0:
        order = order[x[order] >= x.max() + draw["temperature"] * math.log(draw["min_p"])]
    order.sort()
    times = -np.log1p(-noise(int(draw["seed"]), int(draw["position"]), int(draw["stream"]), order))
    return int(order[(weights[order] / times).argmax()]), 0


@op(tolerance=1e-5)
def top_logprobs(logits: Array, queries: Records, k: int, drawn: Found | None = None) -> tuple[Found, Found, Found]:
    """Scores [n] (SCORE) of the targets of `queries` [n] (QUERY); each row's k best ids and log-probabilities [n, k].

    Best first, equal logits by ascending id; where fewer than k logits are above -inf the id is -1. A row with a flag
    has undefined figures. A target of -1 - i is the i-th of `drawn`, tokens that `sample` found (any where it is -1).
    """
    queries = with_drawn(queries, drawn)
    scores = np.zeros(len(queries), SCORE)
    ids = np.full((len(queries), k), -1, np.int32)
    logprobs = np.full((len(queries), k), -np.inf, np.float32)
    for i, (row, target) in enumerate(queries.tolist()):
        x = np.asarray(logits[row], np.float64)
        scores[i]["flags"] = flags = _flags(x)
        if flags:
            continue
        lse = x.max() + math.log(np.exp(x - x.max()).sum())
        rank = 1 + int((x > x[target]).sum()) + int((x[:target] == x[target]).sum())
        scores[i] = (lse, x[target] - lse, rank, 0, 0)
        best = np.lexsort((np.arange(len(x)), -x))[:k]
        best = best[x[best] > -np.inf]
        ids[i, : len(best)], logprobs[i, : len(best)] = best, x[best] - lse
    return scores, ids, logprobs


def with_drawn(queries: Records, drawn: Found | None) -> Records:
    """`queries` with the targets that are places in `drawn` looked up, on the host."""
    if drawn is None:
        return queries
    queries = queries.copy()
    targets = queries["target"]
    targets[targets < 0] = np.maximum(np.asarray(drawn)[-1 - targets[targets < 0]], 0)
    return queries


def draw_record(row: int = 0, seed: int = 0, position: int = 0, stream: int = 0, **options: float) -> tuple[Any, ...]:
    """A DRAW record as a tuple; `options` are temperature (1), top_k (0), top_p (1) and min_p (0)."""
    get = options.get
    return (
        row,
        int(get("top_k", 0)),
        seed,
        position,
        stream,
        get("temperature", 1.0),
        get("top_p", 1.0),
        get("min_p", 0.0),
    )
