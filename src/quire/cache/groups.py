"""Groups of layers that share a block table, so that layers with a window can free what slid out of it.

Models interleave layers of local and global attention (Beltagy et al. 2020). One pool of blocks of equal bytes serves
all groups, as in vLLM's hybrid KV cache manager: a block holds what one group's layers keep of `block_size` tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from quire.cache.lanes import Lanes

MAX_GROUPS = 8
"""Each group costs a table per sequence, filled in Python at every step."""


@dataclass(frozen=True)
class TableSizes:
    """What decides how many blocks a sequence holds: tokens of a block and, at most, of a step; windows of groups;
    over how many holders its tables are spread."""

    block_size: int
    max_chunk: int
    windows: tuple[int, ...] = (0,)
    holders: int = 1

    @cached_property
    def lanes(self) -> Lanes:
        """Who has which blocks of a table."""
        return Lanes(self.holders, self.block_size)

    def entries(self, tokens: int) -> int:
        """Entries of a table for `tokens` tokens."""
        return -(-tokens // self.block_size)

    def most(self, tokens: int, window: int) -> int:
        """The most blocks that a table of a sequence of `tokens` tokens holds at one time."""
        return self.entries(min(tokens, window + self.max_chunk + self.block_size) if window else tokens)

    def kept(self, tokens: int, window: int) -> int:
        """Blocks that it holds between steps, all of whose tokens but the last are computed."""
        return self.entries(tokens) - (max(0, tokens - window) // self.block_size if window else 0)

    def footprint(self, tokens: int) -> int:
        """Blocks that a cache needs at least for its tables, every holder as many as the one that has most."""
        return self.holders * sum(self.lanes.fullest(self.most(tokens, window)) for window in self.windows)

    def capacity(self, blocks: int, longest: int) -> int:
        """Tokens, up to `longest`, of a sequence that never holds more than `blocks` blocks."""
        return bisect_right(range(longest + 1), blocks, key=self.footprint) - 1


@dataclass(frozen=True)
class LayerGroups:
    """`layers` of each group, and what its layers see: `windows` in tokens, 0 = everything.

    A block has room for `width` layers; a group of fewer leaves the rest of its blocks unused.
    """

    windows: tuple[int, ...]
    layers: tuple[tuple[int, ...], ...]

    @property
    def widest(self) -> tuple[int, ...]:
        """The layers of the first group that fills its blocks."""
        return max(self.layers, key=len)

    @property
    def width(self) -> int:
        """Layers a block has room for."""
        return len(self.widest)

    def home(self, layer: int) -> tuple[int, int]:
        """(group, place in its blocks) of `layer`; StopIteration if it is in none."""
        return next((g, held.index(layer)) for g, held in enumerate(self.layers) if layer in held)

    def slots(self, length: int) -> int:
        """Slots of one layer and token that a sequence of `length` tokens holds between steps, whole blocks aside."""
        return self.width * sum(min(length, window or length) for window in self.windows)


def one_group(windows: Mapping[int, int], length: int) -> LayerGroups:
    """All layers (number -> window) in one group, which keeps what any of them sees of `length` tokens."""
    every = all(0 < window < length for window in windows.values())
    return LayerGroups((max(windows.values()) if every else 0,), (tuple(windows),))


def group_layers(windows: Mapping[int, int], length: int) -> LayerGroups:
    """Cut layers (number -> window) into groups such that a sequence of `length` tokens holds the least memory.

    Groups of one window are cut to one width, since they take blocks from one pool: what layers keep must be alike. A
    window that `length` does not exceed is none. Of plans that hold the same, the one with the fewest groups is taken.
    """
    kinds: dict[int, list[int]] = {}
    for layer, window in windows.items():
        kinds.setdefault(window if window < length else 0, []).append(layer)
    plans = [one_group(windows, length)]
    for width in range(1, max(map(len, kinds.values())) + 1):
        cut = [
            (window, tuple(layers[at : at + width]))
            for window, layers in sorted(kinds.items())
            for at in range(0, len(layers), width)
        ]
        if len(cut) <= MAX_GROUPS:
            plans.append(LayerGroups(tuple(w for w, _ in cut), tuple(held for _, held in cut)))
    return min(plans, key=lambda plan: (plan.slots(length), len(plan.layers)))
