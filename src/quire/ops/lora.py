"""The ops of adapters, with their cases."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from quire.ops.cases import normal
from quire.ops.op import Case, cases, op


@op(tolerance=2e-6)
def lora(x: Tensor, y: Tensor, a: Tensor, b: Tensor, rows: Tensor, start: int) -> Tensor:
    """y[:, start:start + n] += (x a[s]^T) b[s] in place, s = rows[t] the adapter of row t, none where negative.

    x [T, k], y [T, width] f32; a [slots, rank, k], b [slots, rank, n] f32; rows int32, its first T numbers count (it
    may be longer: the step's array). Returns y. A row's numbers depend on that row alone (Hu et al. 2021).
    """
    slots = rows[: len(x)].long()
    for slot in range(len(a)):
        at = slots == slot
        if bool(at.any()):
            y[at, start : start + b.shape[2]] += x[at] @ a[slot].t() @ b[slot]
    return y


@op(tolerance=2e-6)
def lora_expand(h: Tensor, y: Tensor, b: Tensor, rows: Tensor, start: int) -> Tensor:
    """y[:, start:start + n] += h b[s] in place, s = rows[t] the adapter of row t, none where negative.

    h [T, rank] f32: rows of an A that are looked up, or ones, which make of b [slots, rank, n] f32 a bias of each
    adapter. y [T, width] f32; rows int32, its first T numbers count. Returns y.
    """
    slots = rows[: len(y)].long()
    for slot in range(len(b)):
        at = slots == slot
        if bool(at.any()):
            y[at, start : start + b.shape[2]] += h[at] @ b[slot]
    return y


@op(tolerance=2e-6)
def lora_scale(y: Tensor, excess: Tensor, rows: Tensor) -> Tensor:
    """y *= 1 + excess[s] in place, s = rows[t] the adapter of row t; rows with a negative s keep every bit. Returns y.

    y [T, n] f32; excess [slots, 1, n] f32, at least -1; rows int32, its first T numbers count. These are the factors of
    DoRA (Liu et al. 2024), which lie around one.
    """
    slots = rows[: len(y)].long()
    at = slots >= 0
    y[at] *= 1 + excess[slots[at], 0]
    return y


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
