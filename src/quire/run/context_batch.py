"""A step's batches where a sequence's keys and values are spread over ranks."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from quire.cache.groups import Lanes
from quire.model.batch import Batch
from quire.model.build import Model
from quire.model.load.parallel_decoder import share_of
from quire.model.load.roles import local_spec
from quire.model.net.context_parallel import ContextParallelBatch, KeyExchange
from quire.ops.arrays import Array
from quire.run.arrays import Arrays
from quire.run.builder import StepSizes
from quire.run.caches import Caches
from quire.run.context_parallel import ContextRank, GroupKeys, PagedSequences, RankRows, divide


class ContextSplitter:
    """Makes what this rank computes of a step out of the arrays of the whole step."""

    def __init__(self, model: Model, caches: Caches, windows: tuple[int, ...]) -> None:
        """`windows`: of the groups of layers, as their block tables are kept; 0: all."""
        self._part = ContextRank(model.place.along("context"), Lanes(model.place.topology.context, caches.block_size))
        (cache,) = caches.of_layer[0]
        layout = cache.layout
        heads, d = local_spec(model.spec, share_of(model.place, ())).heads, layout.head_dim
        block_bytes = layout.bytes_per_token * layout.block_size
        self._held = [GroupKeys(window, heads * d, heads * (d + 2), block_bytes) for window in windows]

    def batches(self, arrays: Arrays, shape: StepSizes) -> list[Batch]:
        """Make this rank's rows of the step whose arrays are filled: a batch per group of layers."""
        tokens, seqs, logits, blocks = shape[:4]
        whole = arrays.batches(tokens, seqs, logits)
        rows = divide(PagedSequences(arrays.cu_q[: seqs + 1].astype(np.int64), arrays.context[:seqs].astype(np.int64)),
                      self._part.ranks)  # fmt: skip
        tables = arrays.block_tables[:, :seqs, :blocks]
        ways = [self._part.way(rows, slots[:tokens], table, held)
                for slots, table, held in zip(arrays.slots, tables, self._held, strict=False)]  # fmt: skip
        if not rows.divided:
            return [_spread(batch, slots=self._part.slots(slots[:tokens]), way=way)
                    for batch, slots, way in zip(whole, arrays.slots, ways, strict=True)]  # fmt: skip
        return self._divided(arrays, rows, logits, whole[0], ways)

    def _divided(
        self, arrays: Arrays, rows: RankRows, logits: int, whole: Batch, ways: list[KeyExchange]
    ) -> list[Batch]:
        own = rows.index[rows.own(self._part.rank)]
        arrays.adapters[: len(own)] = arrays.adapters[own]
        owner = np.repeat(np.arange(self._part.ranks), rows.counts)
        place = np.empty(len(rows.index), np.int64)
        place[rows.index] = np.arange(len(rows.index))
        wanted = place[arrays.logit_rows[:logits]]  # by rank and row, which is how those of all ranks are gathered
        scored = np.bincount(owner[wanted], minlength=self._part.ranks)
        first = rows.own(self._part.rank).start
        mine = np.sort(wanted[owner[wanted] == self._part.rank]) - first
        order = np.empty(logits, np.int64)
        order[np.argsort(wanted, kind="stable")] = np.arange(logits)
        batch = ContextParallelBatch(
            tokens=_picked(arrays.tokens, own),
            positions=_picked(arrays.positions, own),
            slots=np.full(len(own), -1, np.int64),
            cu_q=whole.cu_q,
            context=whole.context,
            block_tables=whole.block_tables,
            logit_rows=mine.astype(np.int32),
            scored=tuple(int(n) for n in scored),
            order=order.astype(np.int32),
        )
        return [_spread(batch, way=way) for way in ways]


def _spread(batch: Batch, **changed: Array | KeyExchange) -> ContextParallelBatch:
    parts = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return ContextParallelBatch(**(parts | changed))


def _picked(numbers: NDArray[np.int32], rows: NDArray[np.int64]) -> Array:
    return numbers[rows]
