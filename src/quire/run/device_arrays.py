"""The arrays of a step on a device: filled on the host, and copied beside the step that runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.dtypes import I32, U8
from quire.ops.backend import Ops
from quire.ops.runtime import QueueEvent, take_drawn
from quire.ops.sampling import Found
from quire.run.arrays import Arrays, cut
from quire.run.step_sizes import Sizes


class _Buffer:
    """A buffer: one of the two sets that a step's arrays go through: pinned on the host, and where they arrive on the
    device."""

    def __init__(self, ops: Ops, sizes: Sizes) -> None:
        cells, runtime = math.prod(sizes.tables), ops.runtime
        self.host, self.host_tables = runtime.pinned(sizes.nbytes), runtime.pinned(4 * cells).view(torch.int32)
        self.arrays: dict[str, NDArray[Any]] = {name: v.numpy() for name, v in cut(sizes, self.host).items()}
        self.device = ops.zeros((sizes.nbytes,), U8)
        self.device_tables = ops.zeros((cells,), I32)
        self.views = cut(sizes, self.device)
        self.sent: QueueEvent | None = None
        self.read: QueueEvent | None = None


class DeviceArrays(Arrays):
    """Arrays on a device: filled in pinned memory, copied beside the step that runs, and put in place between steps.

    There are two sets of buffers, taken in turn, so that the host fills the next step's while the copies of the last
    may still be under way; it waits for a set that the device has not read yet.
    """

    keeps_drawn = True

    def __init__(self, sizes: Sizes, ops: Ops, own: Mapping[str, Tensor]) -> None:
        super().__init__(sizes, ops)
        self._runtime = ops.runtime
        self._buffers = tuple(_Buffer(ops, sizes) for _ in range(2))
        self._turn = 0
        self._place(ops, ops.zeros((sizes.nbytes,), U8), ops.zeros(sizes.tables, I32))
        self._drawn = ops.zeros((sizes.rows,), I32)
        if sizes.cross:
            self._seen = ops.put(np.ones(sizes.rows, np.int32))
            self._seen_tables = ops.zeros((sizes.rows, sizes.blocks), I32)
        self._own = own
        self._use(self._buffers[0].arrays)

    def begin(self) -> None:
        """Take the other set of buffers, once the device has it no more."""
        self._turn = 1 - self._turn
        buffer = self._buffers[self._turn]
        if buffer.sent is not None:
            buffer.sent.wait()
        self._use(buffer.arrays)
        self.encoded[:] = 1

    def send(self, seqs: int, blocks: int) -> None:
        """Queue the copies; the last step still reads the arrays' own memory, so they wait for it in buffers."""
        buffer, groups = self._buffers[self._turn], len(self.block_tables)
        cells = groups * seqs * blocks
        if self.sizes.cross:
            buffer.arrays["owners"][: self.cu_q[seqs]] = self._owners(seqs)
        buffer.host_tables.numpy()[:cells] = self.block_tables[:, :seqs, :blocks].reshape(-1)
        copies = [(buffer.device, buffer.host)]
        if cells:
            copies.append((buffer.device_tables[:cells], buffer.host_tables[:cells]))
        buffer.sent = self._runtime.send(copies, buffer.read)
        placed = [(self._memory, buffer.device)]
        if cells:
            placed.append((self._tables[:, :seqs, :blocks], buffer.device_tables[:cells].view(groups, seqs, blocks)))
        placed += [(array, buffer.views[name]) for name, array in self._own.items()]
        self._runtime.place(placed)
        buffer.read = self._runtime.mark()

    def keep_drawn(self, tokens: Sequence[Found]) -> None:
        """Queue copies to where the next step looks, behind the step that runs."""
        ends = list(accumulate(map(len, tokens), initial=0))
        parts = zip(pairwise(ends), tokens, strict=True)
        self._runtime.place([(self._drawn[start:end], torch.as_tensor(part)) for (start, end), part in parts])

    def complete(self, tokens: int) -> None:
        """Queue it, or record it as a graph's first part: tokens that the step before drew; what cross attention reads.

        That is copied for every row, as a graph knows of each step only how many rows there are.
        """
        take_drawn(self._views["tokens"][:tokens], self._drawn)
        if self.sizes.cross:
            owners = self._views["owners"][:tokens]
            torch.index_select(self._views["encoded"], 0, owners, out=self._seen[:tokens])
            torch.index_select(self._tables[-1], 0, owners, out=self._seen_tables[:tokens])

    def _of_rows(self, tokens: int, seqs: int) -> tuple[Tensor, Tensor]:
        """Where `complete` puts it."""
        return self._seen[:tokens], self._seen_tables[:tokens]
