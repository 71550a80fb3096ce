"""Cases of the ops of `quire.ops.reference.lora`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator

from op_cases.registry import cases
from op_cases.weights import normal
from quire.ops.op import Case


@cases("lora")
def lora_cases(g: Generator) -> Iterator[Case]:
    for t, k, n, width, start, rank in ((1, 32, 16, 16, 0, 4), (7, 70, 33, 90, 50, 3), (40, 64, 600, 700, 64, 16)):
        rows = torch.randint(-1, 3, (t + 5,), generator=g, dtype=torch.int32)
        x, y = normal(g, t, k), normal(g, t, width)
        yield {"x": x, "y": y, "a": normal(g, 3, rank, k), "b": normal(g, 3, rank, n), "rows": rows, "start": start}


@cases("lora_expand")
def lora_expand_cases(g: Generator) -> Iterator[Case]:
    for case in lora_cases(g):
        t, rank = len(case["x"]), case["b"].shape[1]
        yield {"h": normal(g, t, rank)} | {name: case[name] for name in ("y", "b", "rows", "start")}
        yield {"h": torch.ones(t, 1), "b": normal(g, 3, 1, case["b"].shape[2])} | {
            name: case[name].clone() if name == "y" else case[name] for name in ("y", "rows", "start")
        }


@cases("lora_scale")
def lora_scale_cases(g: Generator) -> Iterator[Case]:
    for t, n in ((1, 16), (7, 90), (40, 700), (3, 1)):
        rows = torch.randint(-1, 3, (t + 5,), generator=g, dtype=torch.int32)
        yield {"y": normal(g, t, n), "excess": normal(g, 3, 1, n).clamp(-0.9, 2.0), "rows": rows}
