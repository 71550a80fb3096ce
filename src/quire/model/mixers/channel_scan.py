"""Selective scans of single channels (Mamba: Gu and Dao 2023): each has a time step, and a decay for each number of its
state.

Channels go through a causal convolution first, whose last inputs the cache keeps as tokens with a window. B, C and time
steps are made of the result, of all channels together.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.dtypes import Dtype
from quire.core.exclusions import features as known
from quire.core.exclusions.features import Feature
from quire.model.mixers.mixer import row_format
from quire.model.role import Role
from quire.model.spec import CHANNEL_SCAN, ChannelSizes, ModelSpec
from quire.ops.convolution import RowLayout
from quire.ops.layout import CacheLayout, KVLayout, StateLayout


@dataclass(frozen=True)
class ChannelScan:
    """A `Mixer`. `sizes`: channels, numbers of a channel's state, and rows that the convolution reads."""

    sizes: ChannelSizes
    features: frozenset[Feature] = frozenset({known.CONVOLUTIONS, known.STATES, known.CHANNEL_SCANS})
    own_heads: bool = False
    scaled: bool = False
    out: str = "channel_out"

    @property
    def state(self) -> StateLayout:
        """A matrix of state x channels."""
        return StateLayout(1, self.sizes.state, self.sizes.inner)

    @property
    def read(self) -> tuple[int, int, int]:
        """Rows are read as keys and values of one head."""
        return 1, 1, self.sizes.inner // 2

    @property
    def projected(self) -> int:
        """Numbers of channels and of their gate, of what B, C and time steps are made of, and of time steps."""
        return 3 * self.sizes.inner + self.sizes.rank + 2 * self.sizes.state

    def kept_in(self, asked: str, dtype: Dtype, backend: str) -> Dtype:
        """Keep rows in a format that has no scales (`row_format`)."""
        return row_format(asked, dtype)

    def parts(self, block_size: int, dtype: Dtype, heads: type[KVLayout] = KVLayout) -> CacheLayout:
        """One part, of rows, on every backend alike."""
        return (RowLayout.of(block_size, self.sizes.inner, dtype),)


def _has(spec: ModelSpec, layer: int) -> bool:
    return bool(spec.mixers) and spec.mixers[layer] == CHANNEL_SCAN


_WIDE = Role("linear", lambda s: (s.channels.inner, s.hidden), where=_has)
_PAIR = Role("linear", lambda s: (s.channels.state, s.channels.inner), where=_has, wide=True)
_NORM = Role("vector", lambda s: (s.channels.state,), where=_has, optional=True)
ROLES = {
    "channel_x": _WIDE,
    "channel_z": _WIDE,
    "channel_conv": Role("vector", lambda s: (s.channels.inner, s.channels.taps), where=_has, biased=True),
    "channel_dt": Role("linear", lambda s: (s.channels.rank, s.channels.inner), where=_has, wide=True),
    "channel_b": _PAIR,
    "channel_c": _PAIR,
    "channel_dt_scale": Role("vector", lambda s: (s.channels.rank,), where=_has, optional=True),
    "channel_b_scale": _NORM,
    "channel_c_scale": _NORM,
    "channel_steps": Role("linear", lambda s: (s.channels.inner, s.channels.rank), where=_has, wide=True),
    "channel_decay": Role("vector", lambda s: (s.channels.inner, s.channels.state), where=_has),
    "channel_skip": Role("vector", lambda s: (s.channels.inner,), where=_has),
    "channel_out": Role("linear", lambda s: (s.hidden, s.channels.inner), where=_has),
}
"""Its matrices and vectors on disk, which ranks do not split: what makes B, C and time steps reads all channels."""
