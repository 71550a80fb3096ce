"""The arrays of a step at fixed addresses, so that a recorded step can be replayed on new contents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.model.batch import Batch
from quire.ops.gpu import take_drawn
from quire.ops.runtime import Mark, Runtime
from quire.ops.sampling import Found
from quire.run.shapes import WIDE, Sizes

NO_ARRAYS: Mapping[str, Tensor] = {}


def cut(sizes: Sizes, memory: Tensor) -> dict[str, Tensor]:
    """The arrays of `sizes` as views of `memory` (uint8)."""
    views, at = {}, 0
    for name, shape in sizes.shapes.items():
        dtype = torch.int64 if name in WIDE else torch.int32
        end = at + math.prod(shape) * dtype.itemsize
        views[name] = memory[at:end].view(dtype).view(shape)
        at = end
    return views


class Arrays:
    """What the host fills and the ops read: one memory for both, where the ops run on the host.

    `tokens`: where the host does not know one yet, -1 - i for the i-th that the step before draws. `adapters`: the LoRA
    slots of rows, which the decoder's adapters read where they lie, and `logit_adapters` those of rows of logits.
    `slots` [groups, tokens] and `block_tables` [groups, seqs, blocks] differ by group of layers; the tables keep their
    rows from step to step.

    With an encoder, all but two are of the decoder's part of the sequences. `encoded` [seqs]: tokens of the encoder's
    part, which lies in the blocks of the last of the tables; 1 where the host says nothing.
    """

    def __init__(self, sizes: Sizes, own: Mapping[str, Tensor] = NO_ARRAYS) -> None:
        """`own`: arrays that lie elsewhere, where the decoder's adapters read them."""
        self.max_seqs, self.max_blocks = sizes.seqs, sizes.blocks
        self.block_tables = np.zeros(sizes.tables, np.int32)
        self.sizes = sizes
        self._place(torch.zeros(sizes.nbytes, dtype=torch.uint8), torch.from_numpy(self.block_tables))
        self._views |= own
        self._use({name: view.numpy() for name, view in self._views.items()})
        self.encoded[:] = 1

    def _place(self, memory: Tensor, tables: Tensor) -> None:
        """Let the ops read these."""
        self._memory, self._tables = memory, tables
        self._views = cut(self.sizes, memory)
        self._of_group = list(zip(self._views["slots"], tables, strict=False))
        self._each = torch.arange(self.sizes.rows + 1 if self.sizes.cross else 0, dtype=torch.int32).to(memory.device)

    def _use(self, host: dict[str, NDArray[Any]]) -> None:
        """Let the host fill these."""
        self.slots, self.tokens, self.positions = host["slots"], host["tokens"], host["positions"]
        self.logit_rows = host["logit_rows"]
        self.adapters, self.logit_adapters = host["adapters"], host["logit_adapters"]
        self.cu_q, self.context, self.tree = host["cu_q"], host["context"], host["tree"]
        self.encoded = host.get("encoded", self.context[:0])

    def begin(self) -> None:
        """The host may write from here on."""

    def send(self, seqs: int, blocks: int) -> None:
        """The ops may read from here on: the arrays and the first `blocks` columns of `seqs` rows of the tables."""

    def keep_drawn(self, tokens: Sequence[Found]) -> None:
        """What a step drew, int32 [n] each, for the next one. The host, where nothing is ahead, knows it by then."""

    def complete(self, tokens: int) -> None:
        """The first part of a step of so many: look up what the host did not know, or left to the device."""

    def written(self, shape: Sequence[int]) -> bytes:
        """What a step of the sizes `shape` reads, as another rank's `put` takes it."""
        return b"".join(part.tobytes() for part in self._parts(shape))

    def put(self, shape: Sequence[int], data: bytes) -> None:
        """Write what another rank's arrays hold."""
        at = 0
        for part in self._parts(shape):
            part[...] = np.frombuffer(data, part.dtype, part.size, at).reshape(part.shape)
            at += part.nbytes

    def _parts(self, shape: Sequence[int]) -> list[NDArray[Any]]:
        tokens, seqs, logits, blocks, tree = shape[:5]
        parts = [self.slots[:, :tokens], self.tokens[:tokens], self.positions[:tokens], self.adapters[:tokens],
                 self.logit_rows[:logits], self.cu_q[: seqs + 1], self.context[:seqs],
                 self.logit_adapters[:logits], self.encoded[:seqs], self.block_tables[:, :seqs, :blocks]]  # fmt: skip
        return [*parts, self.tree[:tokens]] if tree else parts

    def batches(self, tokens: int, seqs: int, logits: int, tree: bool = False) -> list[Batch]:
        """Views of the filled part, as ops read them: a batch per group of layers. `tree`: some drafts branch."""
        v, (slots, tables) = self._views, self._of_group[0]
        first = Batch(
            tokens=v["tokens"][:tokens],
            positions=v["positions"][:tokens],
            slots=slots[:tokens],
            cu_q=v["cu_q"][: seqs + 1],
            context=v["context"][:seqs],
            block_tables=tables[:seqs],
            logit_rows=v["logit_rows"][:logits],
            tree=v["tree"][:tokens] if tree else None,
        )
        if self.sizes.cross:
            context, encoded = self._of_rows(tokens, seqs)
            cross = replace(first, cu_q=self._each[: tokens + 1], context=context, block_tables=encoded)
            first = replace(first, cross=cross)
        return [first, *(replace(first, slots=s[:tokens], block_tables=t[:seqs]) for s, t in self._of_group[1:])]

    def _of_rows(self, tokens: int, seqs: int) -> tuple[Tensor, Tensor]:
        """The encoder's part as each row sees it, (tokens of it, their blocks): copies where sequences have several."""
        context, tables = self._views["encoded"][:seqs], self._tables[-1, :seqs]
        if tokens != seqs:
            owners = torch.from_numpy(self._owners(seqs))
            context, tables = context[owners], tables[owners]
        return context, tables

    def _owners(self, seqs: int) -> NDArray[Any]:
        """The sequence of each row."""
        return np.repeat(np.arange(seqs), np.diff(self.cu_q[: seqs + 1]))


class _Buffer:
    """One of the two sets that a step's arrays go through: pinned on the host, and where they arrive on the device."""

    def __init__(self, runtime: Runtime, device: torch.device, sizes: Sizes) -> None:
        cells = math.prod(sizes.tables)
        self.host, self.host_tables = runtime.pinned(sizes.nbytes), runtime.pinned(4 * cells).view(torch.int32)
        self.arrays: dict[str, NDArray[Any]] = {name: v.numpy() for name, v in cut(sizes, self.host).items()}
        self.device = torch.zeros(sizes.nbytes, dtype=torch.uint8, device=device)
        self.device_tables = torch.zeros(cells, dtype=torch.int32, device=device)
        self.views = cut(sizes, self.device)
        self.sent: Mark | None = None
        self.read: Mark | None = None


class DeviceArrays(Arrays):
    """Arrays on a device: filled in pinned memory, copied beside the step that runs, and put in place between steps.

    There are two sets of buffers, taken in turn, so that the host fills the next step's while the copies of the last
    may still be under way; it waits for a set that the device has not read yet.
    """

    def __init__(self, sizes: Sizes, own: Mapping[str, Tensor], runtime: Runtime, device: torch.device) -> None:
        super().__init__(sizes)
        self._runtime = runtime
        self._buffers = tuple(_Buffer(runtime, device, sizes) for _ in range(2))
        self._turn = 0
        tables = torch.zeros(sizes.tables, dtype=torch.int32, device=device)
        self._place(torch.zeros(sizes.nbytes, dtype=torch.uint8, device=device), tables)
        self._drawn = torch.zeros(sizes.rows, dtype=torch.int32, device=device)
        if sizes.cross:
            self._seen = torch.ones(sizes.rows, dtype=torch.int32, device=device)
            self._seen_tables = torch.zeros(sizes.rows, sizes.blocks, dtype=torch.int32, device=device)
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
