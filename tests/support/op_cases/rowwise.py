"""Cases of the ops of `quire.ops.reference.rowwise`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator

from op_cases.registry import cases
from op_cases.weights import normal
from quire.ops.op import Case

SHAPES = ((1, 64), (3, 33), (200, 256), (2, 8), (1, 1), (0, 16), (2, 9000))


@cases("layernorm")
def layernorm_cases(g: Generator) -> Iterator[Case]:
    for t, d in SHAPES:
        bias = normal(g, d) if t % 2 else None
        yield {"x": normal(g, t, d) * 10.0 ** (t % 4 - 1), "weight": normal(g, d), "bias": bias, "eps": 1e-5}
    yield {"x": normal(g, 3, 48) + 100.0, "weight": torch.ones(48), "bias": None, "eps": 1e-5}


@cases("add_layernorm")
def add_layernorm_cases(g: Generator) -> Iterator[Case]:
    for case in layernorm_cases(g):
        yield case | {"delta": normal(g, *case["x"].shape)}


@cases("norm_spans")
def norm_spans_cases(g: Generator) -> Iterator[Case]:
    for t, width, start, count, span in ((1, 64, 0, 64, 64), (5, 96, 32, 48, 24), (40, 33, 3, 30, 5), (0, 16, 0, 8, 8)):
        for centered in (False, True):
            x = normal(g, t, width)
            weight = normal(g, count)
            yield {"x": x, "weight": weight, "start": start, "span": span, "centered": centered, "eps": 1e-5}


@cases("join_columns")
def join_columns_cases(g: Generator) -> Iterator[Case]:
    for t, d in SHAPES:
        yield {"parts": (normal(g, t, d), normal(g, t, 7), normal(g, t, 32))}


@cases("take_columns")
def take_columns_cases(g: Generator) -> Iterator[Case]:
    for t, d in SHAPES:
        yield {"x": normal(g, t, d + 9), "start": t % 9, "width": d}
        yield {"x": normal(g, t, d), "start": 0, "width": d}


@cases("place_columns")
def place_columns_cases(g: Generator) -> Iterator[Case]:
    for t, d in SHAPES:
        yield {"out": normal(g, t + 2, d + 9), "x": normal(g, t, d), "at": t % 9}
        yield {"out": normal(g, t, d), "x": normal(g, t, d), "at": 0}


@cases("add")
def add_cases(g: Generator) -> Iterator[Case]:
    for t, d in SHAPES:
        yield {"x": normal(g, t, d), "delta": normal(g, t, d)}


@cases("add_positions")
def add_positions_cases(g: Generator) -> Iterator[Case]:
    for t, d in SHAPES:
        for offset in (0, 2):
            positions = torch.randint(50, (t,), generator=g, dtype=torch.int32)
            table = normal(g, 50 + offset, d)
            yield {"x": normal(g, t, d), "positions": positions, "table": table, "offset": offset}
            for short in (torch.bfloat16, torch.float16):
                yield {"x": normal(g, t, d), "positions": positions, "table": table.to(short), "offset": offset}


@cases("scale")
def scale_cases(g: Generator) -> Iterator[Case]:
    for t, d in SHAPES:
        yield {"x": normal(g, t, d), "factor": 11.3137085}


@cases("scale_rows")
def scale_rows_cases(g: Generator) -> Iterator[Case]:
    for t, d in SHAPES:
        yield {"x": normal(g, t, d), "factors": normal(g, t), "columns": d}
        positions = torch.randint(60, (t,), generator=g, dtype=torch.int32)
        yield {"x": normal(g, t, d), "factors": normal(g, 60), "columns": d, "positions": positions}
        shifted = {"positions": positions, "step": 7, "ahead": 3}
        yield {"x": normal(g, t, d), "factors": normal(g, 9), "columns": (d + 1) // 2, **shifted}


@cases("softcap")
def softcap_cases(g: Generator) -> Iterator[Case]:
    for t, d in SHAPES:
        yield {"x": normal(g, t, d) * 20.0, "cap": 30.0}


@cases("xielu")
def xielu_cases(g: Generator) -> Iterator[Case]:
    for t, d in SHAPES:
        yield {"x": normal(g, t, d) * 3.0, "positive": 0.8, "negative": 0.9, "beta": 0.5}
    x = torch.tensor([[-1e4, -90.0, -1e-4, -0.0, 0.0, 1e-4, 40.0]])
    yield {"x": x, "positive": 0.3, "negative": 1.7, "beta": 0.25}


@cases("clip")
def clip_cases(g: Generator) -> Iterator[Case]:
    for t, d in SHAPES:
        yield {"x": normal(g, t, d), "limit": 0.75}


@cases("rope_queries")
def rope_queries_cases(g: Generator) -> Iterator[Case]:
    for t, heads, pad, d, half in ((1, 4, 2, 16, 8), (5, 3, 2, 24, 4), (40, 8, 4, 8, 0), (0, 2, 2, 8, 4)):
        angles = torch.rand((64, half), generator=g) * 6
        yield {
            "q": normal(g, t, heads * d),
            "positions": torch.randint(64, (t,), generator=g, dtype=torch.int32),
            "table": torch.stack((angles.cos(), angles.sin()), 1),
            "pad": pad,
            "head_dim": d,
            "norm": normal(g, d) if t != 5 else None,
            "eps": 1e-6,
        }
