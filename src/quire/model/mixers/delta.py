"""The gated delta rule (Yang et al. 2024): a matrix per head is the memory, which each token corrects by its own value.

Queries, keys and values go through a causal convolution first, whose last inputs the cache keeps as tokens with a
window; the matrices are the layer's recurrent state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import Dtype
from quire.core.exclusions import features as known
from quire.core.exclusions.features import Feature
from quire.model.families.delta_sizes import DeltaSizes
from quire.model.mixers.mixer import row_format
from quire.model.role import COLUMNS, ROWS, Role
from quire.model.spec import DELTA, ModelSpec
from quire.ops.convolution import RowLayout
from quire.ops.layout import CacheLayout, KVLayout, StateLayout


@dataclass(frozen=True)
class DeltaRule:
    """A `Mixer`. `sizes`: heads of keys and of values, numbers of each, and rows that the convolution reads."""

    sizes: DeltaSizes
    features: frozenset[Feature] = frozenset({known.CONVOLUTIONS, known.STATES})
    own_heads: bool = False
    scaled: bool = False
    out: str = "delta_out"

    @property
    def state(self) -> StateLayout:
        """A matrix of key_dim x value_dim for each head of values."""
        return StateLayout(self.sizes.value_heads, self.sizes.key_dim, self.sizes.value_dim)

    @property
    def read(self) -> tuple[int, int, int]:
        """Rows are read as keys and values of one head."""
        return 1, 1, self.sizes.width // 2

    @property
    def projected(self) -> int:
        """Numbers of queries, keys, values, their gate, and of what decays are made of."""
        sizes = self.sizes
        return sizes.width + sizes.values + sizes.value_heads + sizes.decays + 2 * sizes.low_rank

    def kept_in(self, asked: str, dtype: Dtype, backend: str) -> Dtype:
        """Keep rows in a format that has no scales (`row_format`)."""
        return row_format(asked, dtype)

    def parts(self, block_size: int, dtype: Dtype, heads: type[KVLayout] = KVLayout) -> CacheLayout:
        """One part, of rows, on every backend alike."""
        return (RowLayout.of(block_size, self.sizes.width, dtype),)


def _has(spec: ModelSpec, layer: int) -> bool:
    return bool(spec.mixers) and spec.mixers[layer] == DELTA


def _straight(spec: ModelSpec, layer: int) -> bool:
    return _has(spec, layer) and not spec.delta.low_rank


def _by_way(spec: ModelSpec, layer: int) -> bool:
    return _has(spec, layer) and spec.delta.low_rank > 0


def _together(spec: ModelSpec, layer: int) -> bool:
    return _has(spec, layer) and not spec.delta.apart


def _apart(spec: ModelSpec, layer: int) -> bool:
    return _has(spec, layer) and spec.delta.apart


def _units(spec: ModelSpec) -> int:
    return spec.delta.key_heads


Where = Callable[[ModelSpec, int], bool]


def _matrix(rows: Callable[[ModelSpec], int], wide: bool = False, where: Where = _has) -> Role:
    return Role("linear", lambda s: (rows(s), s.hidden), ROWS, _units, where=where, wide=wide)


def _down(wide: bool = False) -> Role:
    return Role("linear", lambda s: (s.delta.low_rank, s.hidden), where=_by_way, wide=wide)


def _up(rows: Callable[[ModelSpec], int], wide: bool = False) -> Role:
    return Role("linear", lambda s: (rows(s), s.delta.low_rank), ROWS, _units, where=_by_way, wide=wide)


def _taps(rows: Callable[[ModelSpec], int]) -> Role:
    return Role("vector", lambda s: (rows(s), s.delta.taps), ROWS, _units, where=_apart, biased=True)


def _vector(length: Callable[[ModelSpec], int]) -> Role:
    return Role("vector", lambda s: (length(s),), ROWS, _units, where=_has)


ROLES = {
    "delta_q": _matrix(lambda s: s.delta.keys),
    "delta_k": _matrix(lambda s: s.delta.keys),
    "delta_v": _matrix(lambda s: s.delta.values),
    "delta_z": _matrix(lambda s: s.delta.values, where=_straight),
    "delta_b": _matrix(lambda s: s.delta.value_heads, wide=True),
    "delta_a": _matrix(lambda s: s.delta.decays, wide=True, where=_straight),
    "delta_a_down": _down(wide=True),
    "delta_a_up": _up(lambda s: s.delta.decays, wide=True),
    "delta_z_down": _down(),
    "delta_z_up": _up(lambda s: s.delta.values),
    "delta_conv": Role("vector", lambda s: (s.delta.width, s.delta.taps), where=_together, biased=True),
    "delta_conv_q": _taps(lambda s: s.delta.keys),
    "delta_conv_k": _taps(lambda s: s.delta.keys),
    "delta_conv_v": _taps(lambda s: s.delta.values),
    "delta_decay": _vector(lambda s: s.delta.value_heads),
    "delta_bias": _vector(lambda s: s.delta.decays),
    "delta_scale": Role("vector", lambda s: (s.delta.value_dim,), where=_has),
    "delta_out": Role("linear", lambda s: (s.hidden, s.delta.values), COLUMNS, _units, where=_has),
}
"""Its matrices and vectors on disk, split over ranks by heads of keys, with the heads of values that they serve. The
taps of the one convolution, the oldest first, are of all queries, keys and values; each rank has all of them. Queries,
keys and values may have taps each, and what decays and gates are made of may go through a smaller space, which each
rank has all of."""

GROUPED: dict[str, tuple[Callable[[ModelSpec], int], dict[str, Callable[[ModelSpec], int]]]] = {
    "delta_qkvz": (
        _units,
        {
            "delta_q": lambda s: s.delta.key_dim,
            "delta_k": lambda s: s.delta.key_dim,
            "delta_v": lambda s: s.delta.values // s.delta.key_heads,
            "delta_z": lambda s: s.delta.values // s.delta.key_heads,
        },
    ),
    "delta_ba": (
        _units,
        {
            "delta_b": lambda s: s.delta.value_heads // s.delta.key_heads,
            "delta_a": lambda s: s.delta.value_heads // s.delta.key_heads,
        },
    ),
}
"""Fused matrices on disk that hold, for each of so many heads, the rows of several roles behind each other."""


def _tiled_heads(spec: ModelSpec, each: int) -> NDArray[np.int64]:
    """Where `each` numbers of every head of values lie in files that have the first head of each key, then the second
    ones, and so on. Ours are those of the first key, then those of the second one."""
    served = spec.delta.value_heads // spec.delta.key_heads
    heads = np.arange(spec.delta.value_heads, dtype=np.int64).reshape(served, -1).T.flatten()
    return (heads[:, None] * each + np.arange(each)).flatten()


def _tiled_values(spec: ModelSpec) -> NDArray[np.int64]:
    return _tiled_heads(spec, spec.delta.value_dim)


def _one_a_head(spec: ModelSpec) -> NDArray[np.int64]:
    return _tiled_heads(spec, 1)


def _tiled_channels(spec: ModelSpec) -> NDArray[np.int64]:
    before = 2 * spec.delta.keys
    return np.concatenate((np.arange(before), before + _tiled_values(spec)))


TILED: dict[str, Callable[[ModelSpec], NDArray[np.int64]]] = {
    **dict.fromkeys(("delta_v", "delta_z", "delta_out"), _tiled_values),
    **dict.fromkeys(("delta_b", "delta_a", "delta_decay", "delta_bias"), _one_a_head),
    "delta_conv": _tiled_channels,
}
"""Role -> where our rows, columns of the last matrix, lie in files whose heads of values take turns by keys."""


def with_delta_heads(spec: ModelSpec, held: Callable[[str], tuple[int, int]]) -> ModelSpec:
    """`spec` with the heads of a rank. `held`: (first, stop) of the units that it has of a role."""
    first, stop = held("delta_q")
    each = spec.delta.value_heads // max(1, spec.delta.key_heads)
    return replace(spec, delta=replace(spec.delta, key_heads=stop - first, value_heads=(stop - first) * each))
