"""A gated short convolution over tokens (LFM2, Liquid AI 2025): each channel's last few rows, between two gates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from quire.core.dtypes import Dtype
from quire.core.exclusions import features as known
from quire.core.exclusions.features import Feature
from quire.model.mixers.mixer import row_format
from quire.model.role import COLUMNS, ROWS, Role
from quire.model.spec import CONVOLUTION, ModelSpec
from quire.ops.convolution import RowLayout
from quire.ops.layout import CacheLayout, KVLayout, StateLayout

TOGETHER = 8
"""Channels that stay on one rank."""


@dataclass(frozen=True)
class ShortConvolution:
    """A `Mixer`. Each of `width` channels reads its last `taps` rows, which the cache keeps as tokens with a window."""

    width: int
    taps: int
    features: frozenset[Feature] = frozenset({known.CONVOLUTIONS})
    own_heads: bool = False
    scaled: bool = False
    state: StateLayout | None = None
    out: str = "conv_out"

    @property
    def read(self) -> tuple[int, int, int]:
        """Rows are read as keys and values of one head."""
        return 1, 1, self.width // 2

    @property
    def projected(self) -> int:
        """Numbers of both gates and of what is convolved."""
        return 3 * self.width

    def kept_in(self, asked: str, dtype: Dtype, backend: str) -> Dtype:
        """Keep rows in a format that has no scales (`row_format`)."""
        return row_format(asked, dtype)

    def parts(self, block_size: int, dtype: Dtype, heads: type[KVLayout] = KVLayout) -> CacheLayout:
        """One part, of rows, on every backend alike."""
        return (RowLayout.of(block_size, self.width, dtype),)


def _has(spec: ModelSpec, layer: int) -> bool:
    return bool(spec.mixers) and spec.mixers[layer] == CONVOLUTION


def _units(spec: ModelSpec) -> int:
    return spec.conv.width // TOGETHER


_GATE = Role("linear", lambda s: (s.conv.width, s.hidden), ROWS, _units, where=_has)
ROLES = {
    "conv_write": _GATE,
    "conv_read": _GATE,
    "conv_x": _GATE,
    "conv": Role("vector", lambda s: (s.conv.width, s.conv.taps), ROWS, _units, where=_has, biased=True),
    "conv_out": Role("linear", lambda s: (s.hidden, s.conv.width), COLUMNS, _units, where=_has),
}
"""Its matrices and vectors on disk, split over ranks by channels: the gates before and after the convolution, what is
convolved, and its taps, the oldest first."""


def with_channels(spec: ModelSpec, held: Callable[[str], tuple[int, int]]) -> ModelSpec:
    """`spec` with the channels of a rank. `held`: (first, stop) of the units that it has of a role."""
    first, stop = held("conv")
    return replace(spec, conv=replace(spec.conv, width=(stop - first) * TOGETHER))
