"""The ops of adapters, with their cases."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.op import op


@op(tolerance=2e-6, into="y")
def lora(x: Tensor, y: Tensor, a: Tensor, b: Tensor, rows: Tensor, start: int) -> Tensor:
    """y[:, start:start + n] += (x a[s]^T) b[s] in place, s = rows[t] the adapter of row t, none where negative.

    x [T, k], y [T, width] f32; a [slots, rank, k], b [slots, rank, n] f32; rows int32, its first T numbers count (it
    may be longer: the step's array). Returns y. A row's numbers depend on that row alone (Hu et al. 2021).
    """
    y, slots = y.clone(), rows[: len(x)].long()
    for slot in range(len(a)):
        at = slots == slot
        if bool(at.any()):
            y[at, start : start + b.shape[2]] += x[at] @ a[slot].t() @ b[slot]
    return y


@op(tolerance=2e-6, into="y")
def lora_expand(h: Tensor, y: Tensor, b: Tensor, rows: Tensor, start: int) -> Tensor:
    """y[:, start:start + n] += h b[s] in place, s = rows[t] the adapter of row t, none where negative.

    h [T, rank] f32: rows of an A that are looked up, or ones, which make of b [slots, rank, n] f32 a bias of each
    adapter. y [T, width] f32; rows int32, its first T numbers count. Returns y.
    """
    y, slots = y.clone(), rows[: len(y)].long()
    for slot in range(len(b)):
        at = slots == slot
        if bool(at.any()):
            y[at, start : start + b.shape[2]] += h[at] @ b[slot]
    return y


@op(tolerance=2e-6, into="y")
def lora_scale(y: Tensor, excess: Tensor, rows: Tensor) -> Tensor:
    """y *= 1 + excess[s] in place, s = rows[t] the adapter of row t; rows with a negative s keep every bit. Returns y.

    y [T, n] f32; excess [slots, 1, n] f32, at least -1; rows int32, its first T numbers count. These are the factors of
    DoRA (Liu et al. 2024), which lie around one.
    """
    slots = rows[: len(y)].long()
    return torch.where((slots >= 0)[:, None], y * (1 + excess[slots.clamp(min=0), 0]), y)
