"""Selective scans (Mamba-2: Dao and Gu 2024): a matrix per head that decays with each token's time step and gets its x.

x, B and C go through a causal convolution first, whose last inputs the cache keeps as tokens with a window; the
matrices are the layer's recurrent state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from quire.core.dtypes import Dtype
from quire.core.exclusions import features as known
from quire.core.exclusions.features import Feature
from quire.model.mixers.mixer import row_format
from quire.model.role import COLUMNS, ROWS, SHARED, Role
from quire.model.spec import SCAN, ModelSpec, ScanSizes
from quire.ops.convolution import RowLayout
from quire.ops.layout import CacheLayout, KVLayout, StateLayout


@dataclass(frozen=True)
class SelectiveScan:
    """A `Mixer`. `sizes`: heads, groups of B and C, and rows that the convolution reads."""

    sizes: ScanSizes
    features: frozenset[Feature] = frozenset({known.CONVOLUTIONS, known.STATES})
    own_heads: bool = False
    scaled: bool = False
    out: str = "scan_out"

    @property
    def state(self) -> StateLayout:
        """A matrix of state x head_dim for each head."""
        return StateLayout(self.sizes.heads, self.sizes.state, self.sizes.head_dim)

    @property
    def read(self) -> tuple[int, int, int]:
        """Rows are read as keys and values of one head."""
        return 1, 1, self.sizes.width // 2

    @property
    def projected(self) -> int:
        """Numbers of the gate, of x, B and C, and of time steps."""
        return self.sizes.inner + self.sizes.width + self.sizes.heads

    def kept_in(self, asked: str, dtype: Dtype, backend: str) -> Dtype:
        """Keep rows in a format that has no scales (`row_format`)."""
        return row_format(asked, dtype)

    def parts(self, block_size: int, dtype: Dtype, heads: type[KVLayout] = KVLayout) -> CacheLayout:
        """One part, of rows, on every backend alike."""
        return (RowLayout.of(block_size, self.sizes.width, dtype),)


def _has(spec: ModelSpec, layer: int) -> bool:
    return bool(spec.mixers) and spec.mixers[layer] == SCAN


def _units(spec: ModelSpec) -> int:
    return spec.scan.heads


def _groups(spec: ModelSpec) -> int:
    return spec.scan.groups


def _inner(rows: bool) -> Role:
    return Role("linear", lambda s: (s.scan.inner, s.hidden) if rows else (s.hidden, s.scan.inner),
                ROWS if rows else COLUMNS, _units, where=_has)  # fmt: skip


def _pairs() -> Role:
    return Role("linear", lambda s: (s.scan.pairs, s.hidden), ROWS, _groups, where=_has, spread=SHARED)


def _vector(length: Callable[[ModelSpec], int], optional: bool = False) -> Role:
    return Role("vector", lambda s: (length(s),), ROWS, _units, where=_has, optional=optional)


ROLES = {
    "scan_z": _inner(True),
    "scan_x": _inner(True),
    "scan_b": _pairs(),
    "scan_c": _pairs(),
    "scan_dt": Role("linear", lambda s: (s.scan.heads, s.hidden), ROWS, _units, where=_has, wide=True),
    "scan_conv": Role("vector", lambda s: (s.scan.width, s.scan.taps), where=_has, biased=True),
    "scan_decay": _vector(lambda s: s.scan.heads),
    "scan_skip": _vector(lambda s: s.scan.heads),
    "scan_bias": _vector(lambda s: s.scan.heads),
    "scan_scale": _vector(lambda s: s.scan.inner, optional=True),
    "scan_out": _inner(False),
}
"""Its matrices and vectors on disk, split over ranks by heads; more ranks than groups have the same B and C. The taps
of the convolution, the oldest first, are of x, B and C; each rank has all of them."""


def with_scan_heads(spec: ModelSpec, held: Callable[[str], tuple[int, int]]) -> ModelSpec:
    """`spec` with the heads of a rank. `held`: (first, stop) of the units that it has of a role."""
    (first, stop), (first_group, stop_group) = held("scan_x"), held("scan_b")
    return replace(spec, scan=replace(spec.scan, heads=stop - first, groups=stop_group - first_group))
