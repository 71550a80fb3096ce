"""What MLPs and their experts are to ops: activations, matrices, and how a router chooses (Shazeer et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import F32
from quire.ops.arrays import Array, dtype_of
from quire.ops.facts import LANES
from quire.ops.weights import Packed

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
"""The names that config.json files give them."""
SCORES = ("softmax", "sigmoid", "sparsemixer", "late_sigmoid", "sqrtsoftplus")
"""How logits become scores."""


@dataclass(frozen=True)
class Routing:
    """How a router chooses `top_k` of `experts` and weighs them.

    `score`: "softmax" over all experts, "sigmoid" of each, "late_sigmoid" (of those that their logits choose),
    "sqrtsoftplus" (of each the root of its softplus, DeepSeek V4), or "sparsemixer" (Phi-3.5-MoE, Liu et al. 2023: two
    experts, each weighed by a softmax over the logits within 2 * `jitter` of the best of those left). `renormalize`:
    weights of the chosen sum to 1 (a softmax over their logits alone is the same). `scale` multiplies weights. `groups`
    > 1: experts in equal groups, of which those with the `top_groups` largest sums of their best `group_best` scores
    take part (DeepSeek-V2 and V3).
    """

    experts: int
    top_k: int
    score: str = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    jitter: float = 0.0


@dataclass(frozen=True, eq=False)
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


class Clamp(NamedTuple):
    """The numbers of `clamped_swiglu`: up lies in [-limit, limit], gate is at most `most`, None: `limit`."""

    alpha: float
    limit: float
    shift: float = 1.0
    most: float | None = None


@dataclass(frozen=True)
class ExpertActivation:
    """What stands between an expert's matrices: act(gate) * up, `kind` a key of ACTIVATIONS; or `clamped_swiglu`, by
    `clamp`."""

    kind: str
    clamp: Clamp | None = None


Choices = tuple[Array, Array, Array, Array]
"""tokens, places, offsets as `sort_by_expert` gives them, and the weights of `route`.

Offsets may end before the room for pairs does: what comes of the others is whatever it is, and weighs 0 where `combine`
sums it up.
"""


def padded_rows(n: int) -> NDArray[np.int64]:
    """Indices of rows that pad a matrix of n rows to a multiple of LANES by repeating the last."""
    return np.minimum(np.arange(-(-n // LANES) * LANES), n - 1)
