"""The op of low-rank adapters, with its cases."""

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


@cases("lora")
def lora_cases(g: Generator) -> Iterator[Case]:
    for t, k, n, width, start, rank in ((1, 32, 16, 16, 0, 4), (7, 70, 33, 90, 50, 3), (40, 64, 600, 700, 64, 16)):
        rows = torch.randint(-1, 3, (t + 5,), generator=g, dtype=torch.int32)
        x, y = normal(g, t, k), normal(g, t, width)
        yield {"x": x, "y": y, "a": normal(g, 3, rank, k), "b": normal(g, 3, rank, n), "rows": rows, "start": start}
