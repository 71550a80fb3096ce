"""Groups of layers that share a block table, so that layers with a window can free what slid out of it.
See docs/design/kv-cache.md.

Models interleave layers of local and global attention (Beltagy et al. 2020). One pool of blocks of equal bytes serves
all groups, as in vLLM's hybrid KV cache manager: a block holds what one group's layers keep of `block_size` tokens,
whether they keep it alike or not. Where several holders have a sequence's blocks, these lie in lanes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

from quire.core.parallel import SPLIT
from quire.core.windows import first_seen, most_seen, widest

MAX_GROUPS = 8
"""Each group costs a table per sequence, filled in Python at every step."""


@dataclass(frozen=True)
class Lanes:
    """Which of `count` holders has which blocks, of `block_size` tokens, of a sequence: whole splits of keys, in turn.

    Attention folds what it has of `SPLIT` keys at a time, so a split that one holder has whole leaves the same bits as
    in one cache. A holder is a lane; block ids name them: id % count is the lane of a block.
    """

    count: int
    block_size: int

    @property
    def run(self) -> int:
        """Blocks next to each other in a sequence that are of one lane."""
        return max(1, SPLIT // self.block_size)

    def of(self, index: int) -> int:
        """The lane of the block of that index in its sequence's table."""
        return index // self.run % self.count

    def spread(self, blocks: int) -> list[int]:
        """How many of the first `blocks` of a table are of each lane."""
        turns, rest = divmod(blocks, self.run * self.count)
        return [turns * self.run + min(max(0, rest - lane * self.run), self.run) for lane in range(self.count)]

    def fullest(self, blocks: int) -> int:
        """The most of `blocks` neighbours of a table that are of one lane, wherever they begin."""
        turns, rest = divmod(blocks, self.run * self.count)
        return turns * self.run + min(rest, self.run)


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
        return self.entries(min(tokens, most_seen(window) + self.max_chunk + self.block_size) if window else tokens)

    def kept(self, tokens: int, window: int) -> int:
        """Blocks that it holds between steps, all of whose tokens but the last are computed."""
        return self.entries(tokens) - first_seen(window, max(0, tokens - 1)) // self.block_size

    def footprint(self, tokens: int) -> int:
        """Blocks that a cache needs at least for its tables, every holder as many as the one that has most."""
        return self.holders * sum(self.lanes.fullest(self.most(tokens, window)) for window in self.windows)

    def capacity(self, blocks: int, longest: int) -> int:
        """Tokens, up to `longest`, of a sequence that never holds more than `blocks` blocks."""
        return bisect_right(range(longest + 1), blocks, key=self.footprint) - 1


@dataclass(frozen=True)
class LayerGroups:
    """`layers` of each group, and what its layers see: `windows` (`core.windows`), 0 = everything.

    A block has room for `width` layers; a group of fewer leaves the rest of its blocks unused. Where layers keep
    different numbers of bytes of a token, `sizes` says how many, in the order of `layers`, and `width` is bytes.
    """

    windows: tuple[int, ...]
    layers: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, ...], ...] = ()

    @property
    def widest(self) -> tuple[int, ...]:
        """The layers of the first group that fills its blocks."""
        return self.layers[self.filled.index(self.width)]

    @property
    def width(self) -> int:
        """Layers a block has room for, or bytes of a token."""
        return max(self.filled)

    @cached_property
    def filled(self) -> tuple[int, ...]:
        """What fills the blocks of each group: layers, or bytes of a token, of the `width` there is room for."""
        return tuple(map(sum, self.sizes)) if self.sizes else tuple(map(len, self.layers))

    def home(self, layer: int) -> tuple[int, int]:
        """(group, place in its blocks) of `layer`; StopIteration if it is in none.

        A place is a number of layers, or of bytes of a token, that lie before it.
        """
        group, at = next((g, held.index(layer)) for g, held in enumerate(self.layers) if layer in held)
        return group, sum(self.sizes[group][:at]) if self.sizes else at

    def share(self, each: Mapping[int, int]) -> LayerGroups:
        """Cut the groups down to those layers alone that keep the bytes of a token which `each` says."""
        layers = tuple(tuple(layer for layer in held if layer in each) for held in self.layers)
        alike = len(layers) == 1 or len(set(each.values())) == 1
        return LayerGroups(
            self.windows, layers, () if alike else tuple(tuple(map(each.__getitem__, g)) for g in layers)
        )

    def tokens(self, length: int) -> int:
        """Tokens that the tables of a sequence of `length` tokens hold between steps, whole blocks aside."""
        return sum(min(length, most_seen(window) or length) for window in self.windows)


class LayerCache(Protocol):
    """What a layer keeps of each token."""

    @property
    def window(self) -> int:
        """How many tokens back it is read (`core.windows`), 0 = all."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token."""
        ...


def _one_group(parts: Mapping[int, LayerCache], length: int) -> LayerGroups:
    """All layers in one group, which keeps what any of them sees of `length` tokens."""
    windows = [part.window for part in parts.values()]
    every = all(0 < most_seen(window) < length for window in windows)
    return LayerGroups((widest(windows) if every else 0,), (tuple(parts),))


def group_layers(parts: Mapping[int, LayerCache], length: int) -> LayerGroups:
    """Cut layers, what they keep by their numbers, into groups such that a sequence of `length` tokens holds the least
    memory.

    Groups of one window are cut to one width, since they take blocks from one pool. A window that `length` does not
    exceed is none. Of plans that hold the same, the one with the fewest groups is taken.
    """
    kinds: dict[int, list[int]] = {}
    for layer, part in parts.items():
        kinds.setdefault(part.window if most_seen(part.window) < length else 0, []).append(layer)
    sizes = {layer: part.bytes_per_token for layer, part in parts.items()}
    alike, plans = len(set(sizes.values())) == 1, [_one_group(parts, length)]
    if alike and len(kinds) == 1:
        return plans[0]  # narrower groups of layers that are all alike hold as much, or more
    each = dict.fromkeys(parts, 1) if alike else sizes
    for width in _widths(kinds.values(), each):
        cut = [(window, held) for window, layers in sorted(kinds.items()) for held in _cut(layers, each, width)]
        if len(cut) <= MAX_GROUPS:
            plans.append(LayerGroups(tuple(w for w, _ in cut), tuple(held for _, held in cut)).share(each))

    def held(plan: LayerGroups) -> int:
        return plan.tokens(length) * sum(each[layer] for layer in plan.widest)

    return min(plans, key=lambda plan: (held(plan), len(plan.layers)))


def _widths(kinds: Iterable[Sequence[int]], each: Mapping[int, int]) -> list[int]:
    """What a block may have room for: the first layers of some kind, or so many of one size."""
    most = max(each.values())
    found = set()
    for layers in kinds:
        sizes = [each[layer] for layer in layers]
        found |= set(accumulate(sizes)) | {size * count for size in sizes for count in range(1, sizes.count(size) + 1)}
    return sorted(width for width in found if width >= most)


def _cut(layers: Sequence[int], each: Mapping[int, int], width: int) -> list[tuple[int, ...]]:
    """Groups of no more than `width`: each layer, the largest first, is in the first that has room for it."""
    held: list[list[int]] = []
    left: list[int] = []
    for layer in sorted(layers, key=lambda layer: -each[layer]):
        group = next((g for g, room in enumerate(left) if room >= each[layer]), len(held))
        if group == len(held):
            held.append([])
            left.append(width)
        held[group].append(layer)
        left[group] -= each[layer]
    return [tuple(group) for group in held]
