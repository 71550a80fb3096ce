"""The experts of a layer as ops take them: their matrices, what stands between these, and which rows they get."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import F32
from quire.ops.arrays import Array, dtype_of
from quire.ops.kinds import LANES
from quire.ops.weights import Packed

SCORES = ("softmax", "sigmoid", "sparsemixer")
"""How logits become scores; the position is the number of the kind in csrc/units/moe.h."""


@dataclass(frozen=True)
class Grouped:
    """The matrices [n, k] of all experts, of one weight format, below each other, and biases f32 [experts, n] or None.

    Each expert's rows are padded to a multiple of `LANES` of whatever numbers: no output is read from them.
    """

    packed: Packed
    experts: int
    n: int
    bias: Array | None

    @property
    def k(self) -> int:
        """Columns of each matrix."""
        return self.packed.k


def group(packed: Packed, experts: int, n: int, bias: Array | None) -> Grouped:
    """The experts' matrices as ops read them; `ValueError` unless `packed` and `bias` hold them as `Grouped` says."""
    if packed.n != experts * len(padded_rows(n)):
        raise ValueError(f"{packed.n} rows are not those of {experts} experts of {n}, padded to {LANES} each")
    if bias is not None and (tuple(bias.shape) != (experts, n) or dtype_of(bias) != F32):
        raise ValueError(f"expert biases: need float32 {[experts, n]}, got {bias.dtype} {list(bias.shape)}")
    return Grouped(packed, experts, n, bias)


@dataclass(frozen=True)
class Between:
    """What stands between an expert's matrices: act(gate) * up, `kind` a key of ACTIVATIONS; or `clamped_swiglu`.

    `clamp`: its (alpha, limit).
    """

    kind: str
    clamp: tuple[float, float] | None = None


Choices = tuple[Array, Array, Array, Array]
"""tokens, places, offsets as `sort_by_expert` gives them, and the weights of `route`.

Offsets may end before the room for pairs does: what comes of the others is whatever it is.
"""


def padded_rows(n: int) -> NDArray[np.int64]:
    """Indices of rows that pad a matrix of n rows to a multiple of LANES by repeating the last."""
    return np.minimum(np.arange(-(-n // LANES) * LANES), n - 1)
