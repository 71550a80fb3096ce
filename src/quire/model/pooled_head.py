"""What stands behind a pooled row: dense layers of sentence-transformers, and heads of models that classify."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.ops.arrays import Host

Row = NDArray[np.float64]
_erf = np.vectorize(math.erf, otypes=[np.float64])


def _gelu(x: Row) -> Row:
    return np.asarray(0.5 * x * (1.0 + _erf(x / math.sqrt(2.0))))


ACTIVATIONS: dict[str, Callable[[Row], Row]] = {
    "": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0.0),
    "gelu": _gelu,
    "silu": lambda x: x / (1.0 + np.exp(-x)),
    "sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
}
"""Name, as config.json has it -> function; "" is none."""


@dataclass(frozen=True)
class HeadNorm:
    """A layer norm of `eps`; weight and bias [n] f32, or no bias."""

    weight: Host
    bias: Host | None
    eps: float

    def __call__(self, x: Row) -> Row:
        """x [n] -> [n]."""
        centered = x - x.mean()
        made = centered / np.sqrt((centered * centered).mean() + self.eps) * self.weight
        return np.asarray(made if self.bias is None else made + self.bias)


@dataclass(frozen=True)
class HeadLayer:
    """activation(x weight^T + bias), then a norm where there is one; weight [n, k] f32, bias [n] f32."""

    weight: Host
    bias: Host | None = None
    activation: str = ""
    norm: HeadNorm | None = None

    def __call__(self, x: Row) -> Row:
        """x [k] -> [n], summed in f64."""
        made = (self.weight.astype(np.float64) * x).sum(1)
        made = ACTIVATIONS[self.activation](made if self.bias is None else made + self.bias)
        return made if self.norm is None else self.norm(made)


PooledHead = tuple[HeadLayer, ...]


def run_head(head: PooledHead, row: NDArray[np.float32]) -> NDArray[np.float32]:
    """The layers of `head` on a pooled row [k] f32, in f64; the last one's numbers [n] f32."""
    made = row.astype(np.float64)
    for layer in head:
        made = layer(made)
    return made.astype(np.float32)
