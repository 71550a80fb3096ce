"""Lightning attention (Qin et al. 2024): a matrix per head that decays at a rate fixed for the head and the layer.

Nothing but the matrices, the layer's recurrent state, is kept of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import F32, Dtype
from quire.core.exclusions import features as known
from quire.core.exclusions.features import Feature
from quire.model.mixers.mixer import KV_TYPES
from quire.model.role import COLUMNS, ROWS, Role
from quire.model.spec import LIGHTNING, ModelSpec
from quire.ops.layout import CacheLayout, KVLayout, StateLayout

EPS = 1e-6
"""Of the norm of what all heads found, whatever the other norms have."""


@dataclass(frozen=True)
class Lightning:
    """A `Mixer`. `heads` of queries, keys and values of `head_dim` numbers each."""

    heads: int
    head_dim: int
    features: frozenset[Feature] = frozenset({known.STATES})
    own_heads: bool = False
    scaled: bool = True
    out: str = "lightning_out"

    @property
    def state(self) -> StateLayout:
        """A matrix of head_dim x head_dim for each head."""
        return StateLayout(self.heads, self.head_dim, self.head_dim)

    @property
    def read(self) -> tuple[int, int, int]:
        """No tokens are read."""
        return 0, 0, 0

    @property
    def projected(self) -> int:
        """Numbers of queries, keys, values, and of the gate."""
        return 4 * self.heads * self.head_dim

    def kept_in(self, asked: str, dtype: Dtype, backend: str) -> Dtype:
        """Any format: there are no tokens to keep."""
        return KV_TYPES.get(asked, dtype)

    def parts(self, block_size: int, dtype: Dtype, heads: type[KVLayout] = KVLayout) -> CacheLayout:
        """No parts."""
        return ()


def _has(spec: ModelSpec, layer: int) -> bool:
    return bool(spec.mixers) and spec.mixers[layer] == LIGHTNING


def _heads(spec: ModelSpec) -> int:
    return spec.heads


def _width(spec: ModelSpec) -> int:
    return spec.heads * spec.head_dim


_ROWS = Role("linear", lambda s: (_width(s), s.hidden), ROWS, _heads, where=_has)
ROLES = {
    **{f"lightning_{name}": _ROWS for name in ("q", "k", "v", "gate")},
    "lightning_norm": Role("vector", lambda s: (_width(s),), ROWS, _heads, where=_has),
    "lightning_out": Role("linear", lambda s: (s.hidden, _width(s)), COLUMNS, _heads, where=_has),
}
"""Its matrices and its norm on disk, split over ranks by heads."""

GROUPED: dict[str, tuple[Callable[[ModelSpec], int], dict[str, Callable[[ModelSpec], int]]]] = {
    "lightning_qkv": (_heads, {f"lightning_{name}": lambda s: s.head_dim for name in "qkv"})
}
"""The fused matrix on disk, which holds for each head the rows of its query, key and value behind each other."""


def decays(heads: int, rate: float) -> NDArray[np.float32]:
    """Logarithms of what states of each head are multiplied with at every token, f32 [heads]: slopes of ALiBi (Press et
    al. 2022) times the layer's `rate`."""
    slopes: NDArray[np.float64] = np.exp2(-8.0 / heads * np.arange(1, heads + 1))
    return (-rate * slopes).astype(F32)
