"""Cases of the ops of `quire.ops.reference.streams`."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Generator

from op_cases.registry import cases
from op_cases.weights import normal
from quire.ops.op import Case


@cases("mix_streams")
def mix_cases(g: Generator) -> Iterator[Case]:
    for t, h, n, out, p in ((0, 8, 4, 4, 4), (1, 64, 4, 4, 4), (7, 33, 5, 4, 4), (3, 16, 1, 4, 1), (2, 3, 2, 1, 3)):
        yield {
            "x": normal(g, t, n * h), "m": normal(g, t, p), "weight": normal(g, out * n, p),
            "bias": normal(g, out * n), "out": out,
        }  # fmt: skip


@cases("sinkhorn_gates")
def sinkhorn_cases(g: Generator) -> Iterator[Case]:
    for t, n, turns, least in ((0, 4, 20, 1e-6), (1, 4, 20, 1e-6), (7, 3, 1, 1e-3), (40, 2, 5, 0.0)):
        yield {"x": 2 * normal(g, t, (2 + n) * n), "streams": n, "turns": turns, "most": 2.0, "least": least}


@cases("match_lengths")
def length_cases(g: Generator) -> Iterator[Case]:
    for t, h, streams in ((0, 8, 2), (1, 64, 4), (7, 33, 3), (2, 5, 1)):
        yield {"x": normal(g, t, streams * h), "streams": streams, "least": 1e-5}
    yield {"x": 1e-4 * normal(g, 3, 4 * 16), "streams": 4, "least": 1e-5}


@cases("sparse_gate")
def gate_cases(g: Generator) -> Iterator[Case]:
    for t, f, factor in ((0, 8, 1.0), (1, 64, 1.64), (7, 33, 0.3), (2, 1, 0.5), (3, 500, 1.64)):
        yield {"x": normal(g, t, 2 * f) + 0.5, "factor": factor}


@cases("scale_columns")
def column_cases(g: Generator) -> Iterator[Case]:
    for t, d in ((0, 8), (1, 64), (7, 33)):
        yield {"x": normal(g, t, d), "factors": normal(g, d)}
