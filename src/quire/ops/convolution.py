"""Causal convolutions over tokens (depthwise: each channel alone), and the cache of the rows that they read."""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.dtypes import BF16, F16, F32, Dtype
from quire.ops.arrays import Array
from quire.ops.layout import KVCache, PlainLayout

ROW_FORMATS = (F32, BF16, F16)
"""Of a row in the cache: codes with a scale are not known here."""
MOST_TAPS = 16
"""Rows that a convolution reads at most, its own counted."""


@dataclass(frozen=True)
class RowLayout(PlainLayout):
    """Layout of the rows of a layer: a row of `width` numbers per token, the first half in keys, the other in values.

    So it may lie in blocks beside keys and values per head of other layers.
    """

    @classmethod
    def of(cls, block_size: int, width: int, dtype: Dtype) -> RowLayout:
        """The layout of rows of `width` numbers, an even one."""
        return cls(block_size, 1, width // 2, dtype)

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return 2 * self.head_dim


@dataclass(frozen=True, eq=False)
class Convolution:
    """What a layer's convolution is made of, over n channels.

    `weight` f32 [taps, n], that of the oldest row first; `bias` f32 [n] or None; `activation`: "silu", or "" for none.
    `gated`: a row given is [write gate | read gate | x], n numbers each. What is convolved is then write gate * x, and
    the read gate multiplies the result (LFM2).
    """

    weight: Array
    bias: Array | None = None
    activation: str = ""
    gated: bool = False

    @property
    def taps(self) -> int:
        """Rows that a result depends on, its own counted."""
        return int(self.weight.shape[0])

    @property
    def width(self) -> int:
        """Channels."""
        return int(self.weight.shape[1])


def check_convolution(conv: Convolution, cache: KVCache) -> None:
    """`TypeError` for a cache of something else than rows, `ValueError` for what does not fit it."""
    layout = cache.layout
    if not isinstance(layout, RowLayout):
        raise TypeError("causal_conv: a cache of rows is needed")
    if layout.dtype not in ROW_FORMATS:
        raise ValueError(f"causal_conv: rows are not kept as {layout.dtype}")
    if not 1 <= conv.taps <= MOST_TAPS:
        raise ValueError(f"causal_conv: {conv.taps} taps; there may be 1 to {MOST_TAPS}")
    if conv.width != layout.width:
        raise ValueError(f"causal_conv: {conv.width} channels, the cache has rows of {layout.width}")
    if conv.activation not in ("", "silu"):
        raise ValueError(f"causal_conv: the activation {conv.activation!r} is not known; known: silu")
