"""Which rank computes which rows of a step, where their keys lie, and what passes (`net/context_parallel.py`).
See docs/design/context-parallel.md.

All of it follows from the step's arrays, which every rank has, so nobody has to be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.cache.groups import Lanes
from quire.core.parallel import SPLIT
from quire.core.windows import first_seen
from quire.model.net.context_parallel import Fold, KeyExchange, KeyPages, PassKeys, PassQueries, PassStates
from quire.ops.arrays import Array

Ints = NDArray[np.int64]
FEW_ROWS = 32
"""Rows of a step that all ranks compute: reading the matrices takes as long for one of them."""


@dataclass(frozen=True)
class GroupKeys:
    """What a group of layers sees and keeps: the window, f32 numbers of a row's queries and of its state, and bytes of
    a block's keys and values in a layer."""

    window: int
    query: int
    state: int
    block_bytes: int


@dataclass(frozen=True)
class PagedSequences:
    """Sequences of a step: `cu_q` [S + 1] and `context` [S] of rows in the order of the batch."""

    cu_q: Ints
    context: Ints


@dataclass(frozen=True)
class RankRows:
    """Rows of a step in the order of ranks: `index` [T] of the batch, `counts` by rank (all, where all have all).

    Rows cu_q[p] .. cu_q[p + 1] follow each other in sequence seqs[p]; its keys up to the last of them are context[p].
    `pieces`: how many of these each rank has.
    """

    index: Ints
    counts: tuple[int, ...]
    cu_q: Ints
    context: Ints
    seqs: Ints
    pieces: tuple[int, ...]
    divided: bool

    @property
    def ends(self) -> Ints:
        """Keys that each row sees, but for a window."""
        sizes = np.diff(self.cu_q)
        return np.arange(len(self.index)) - np.repeat(self.cu_q[1:] - self.context, sizes) + 1

    def own(self, rank: int) -> slice:
        """The rows of a rank."""
        first = sum(self.counts[:rank]) if self.divided else 0
        return slice(first, first + self.counts[rank])

    def own_pieces(self, rank: int) -> slice:
        """The pieces of a rank."""
        first = sum(self.pieces[:rank]) if self.divided else 0
        return slice(first, first + self.pieces[rank])


def divide(paged: PagedSequences, ranks: int) -> RankRows:
    """All rows for all, where they are few; else the i-th and the i-th last of 2 * `ranks` parts for rank i.

    So the rows of a prompt that see much and those that see little are spread evenly.
    """
    total, seqs = int(paged.cu_q[-1]), np.flatnonzero(np.diff(paged.cu_q))
    if total <= max(FEW_ROWS, 2 * ranks):
        cu_q = np.append(paged.cu_q[seqs], total)
        return RankRows(
            np.arange(total), (total,) * ranks, cu_q, paged.context[seqs], seqs, (len(seqs),) * ranks, False
        )
    edges = [total * i // (2 * ranks) for i in range(2 * ranks + 1)]
    spans = [[edges[i : i + 2], edges[2 * ranks - 1 - i : 2 * ranks - i + 1]] for i in range(ranks)]
    pieces = [[piece for first, last in each for piece in _cut(paged, first, last)] for each in spans]
    flat = [piece for each in pieces for piece in each]
    sizes = [last - first for _, first, last in flat]
    return RankRows(
        np.concatenate([np.arange(first, last) for _, first, last in flat]),
        tuple(sum(last - first for _, first, last in each) for each in pieces),
        np.cumsum([0, *sizes]),
        np.array([paged.context[s] - (paged.cu_q[s + 1] - last) for s, _, last in flat]),
        np.array([s for s, _, _ in flat]),
        tuple(map(len, pieces)),
        True,
    )


def _cut(paged: PagedSequences, first: int, last: int) -> list[tuple[int, int, int]]:
    """(sequence, first row, last row) of the sequences between two rows."""
    found = []
    while first < last:
        s = int(np.searchsorted(paged.cu_q, first, "right")) - 1
        end = min(last, int(paged.cu_q[s + 1]))
        found.append((s, first, end))
        first = end
    return found


@dataclass(frozen=True)
class VisibleSplits:
    """The splits that rows see: row t those `starts[t]` .. `starts[t + 1]` of the list, ascending; `owner` of each."""

    starts: Ints
    owner: Ints

    @staticmethod
    def of(rows: RankRows, window: int, lanes: Lanes) -> VisibleSplits:
        """Splits that `rows` see."""
        ends = rows.ends
        first = first_seen(window, ends - 1) // SPLIT
        counts = -(-ends // SPLIT) - first
        starts = np.concatenate(([0], np.cumsum(counts)))
        splits = np.arange(starts[-1]) + np.repeat(first - starts[:-1], counts)
        return VisibleSplits(starts, splits * SPLIT // lanes.block_size // lanes.run % lanes.count)

    def left(self, rank: int) -> Ints:
        """Where the states of each row begin that it leaves on a rank, and their number."""
        before = np.concatenate(([0], np.cumsum(self.owner == rank)))
        return before[self.starts]

    def fold(self, rows: slice, ranks: int) -> Fold:
        """Fold of `rows`, whose states lie behind each other by rank, then by row, then by split."""
        begin, end = int(self.starts[rows.start]), int(self.starts[rows.stop])
        owner = self.owner[begin:end]
        order = np.empty(end - begin, np.int64)
        order[np.argsort(owner, kind="stable")] = np.arange(end - begin)
        return Fold(_flat(self.starts[rows.start : rows.stop + 1] - begin), _flat(order))


@dataclass(frozen=True)
class ContextRank:
    """A context rank among `ranks`, and whose blocks are whose."""

    rank: int
    lanes: Lanes

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.lanes.count

    def slots(self, slots: Ints) -> Array:
        """Slots of the whole cache as those of this rank's part, -1 for others'."""
        block, offset = np.divmod(slots, self.lanes.block_size)
        own = block // self.ranks * self.lanes.block_size + offset
        return _flat(np.where(block % self.ranks == self.rank, own, -1))

    def tables(self, tables: NDArray[np.int32]) -> Array:
        """Block tables of the whole cache as those of this rank's part, -1 for others' blocks."""
        lane = np.arange(tables.shape[1]) // self.lanes.run % self.ranks
        return _flat(np.where(lane == self.rank, tables // self.ranks, -1).astype(np.int32))

    def way(self, rows: RankRows, slots: Ints, tables: NDArray[np.int32], held: GroupKeys) -> KeyExchange:
        """How rows see keys. `slots` [T] by row and `tables` [S, blocks] by sequence of the batch, whole cache."""
        seen = VisibleSplits.of(rows, held.window, self.lanes)
        if not rows.divided:
            counts = tuple(int(n) for n in np.bincount(seen.owner, minlength=self.ranks))
            return PassStates(self._pages(rows, tables), _flat(seen.left(self.rank)), counts,
                                seen.fold(rows.own(self.rank), self.ranks))  # fmt: skip
        wanted = _wanted(rows, tables, held.window, self.lanes)
        queries = 4 * (len(rows.index) * held.query + len(seen.owner) * held.state // self.ranks)
        if queries < sum(map(len, wanted)) * held.block_bytes:
            return self._queries(rows, slots, tables, seen)
        return self._keys(rows, slots, tables, wanted)

    def _queries(self, rows: RankRows, slots: Ints, tables: NDArray[np.int32], seen: VisibleSplits) -> PassQueries:
        edges = np.cumsum([0, *rows.counts])
        left, got = seen.left(self.rank), np.diff(seen.starts[edges])
        return PassQueries(rows.counts, self.slots(slots[rows.index]), self._pages(rows, tables), _flat(left),
                             _flat(np.diff(left[edges]).astype(np.int32)), int(got.max()),
                             seen.fold(rows.own(self.rank), self.ranks))  # fmt: skip

    def _keys(self, rows: RankRows, slots: Ints, tables: NDArray[np.int32], wanted: Sequence[Ints]) -> PassKeys:
        own, counts = rows.own_pieces(self.rank), tuple(map(len, wanted))
        places = np.full(int(max(int(ids.max(initial=0)) for ids in wanted)) + 1, -1, np.int32)
        places[np.concatenate(wanted)] = np.arange(sum(counts))
        found = places[np.minimum(tables[rows.seqs[own]], len(places) - 1)]
        cu_q = rows.cu_q[own.start : own.stop + 1] - rows.cu_q[own.start]
        pages = KeyPages(_flat(cu_q.astype(np.int32)), _flat(rows.context[own].astype(np.int32)), _flat(found))
        picks = _flat((wanted[self.rank] // self.ranks).astype(np.int32))
        return PassKeys(rows.counts, self.slots(slots[rows.index]), picks, counts, pages)

    def _pages(self, rows: RankRows, tables: NDArray[np.int32]) -> KeyPages:
        """Pages of all rows, in this rank's part of the cache."""
        cu_q, context = rows.cu_q.astype(np.int32), rows.context.astype(np.int32)
        return KeyPages(_flat(cu_q), _flat(context), self.tables(tables[rows.seqs]))


def _wanted(rows: RankRows, tables: NDArray[np.int32], window: int, lanes: Lanes) -> list[Ints]:
    """The blocks that any row sees, by the rank that has them, each once."""
    size, sizes, seen = lanes.block_size, np.diff(rows.cu_q), []
    for seq, count, context in zip(rows.seqs, sizes, rows.context, strict=True):
        first = first_seen(window, int(context - count)) // size
        seen.append(tables[seq, first : -(-context // size)])
    ids = np.unique(np.concatenate(seen)).astype(np.int64)
    return [ids[ids % lanes.count == lane] for lane in range(lanes.count)]


def _flat(numbers: NDArray[np.int64] | NDArray[np.int32]) -> Array:
    return np.ascontiguousarray(numbers)
