"""The arrays of a step at fixed addresses, so that a recorded step can be replayed on new contents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.model.batch import Batch
from quire.ops.gpu import take_drawn
from quire.ops.runtime import Mark, Runtime
from quire.ops.sampling import Found

ROWS = (("slots", np.int64), ("tokens", np.int32), ("positions", np.int32), ("logit_rows", np.int32),
        ("adapters", np.int32))  # fmt: skip
"""Arrays with a number per row of the batch; those of sequences follow. The widest come first: all stay aligned."""


def _cut(memory: Tensor, rows: int, seqs: int, groups: int) -> dict[str, Tensor]:
    """The arrays of a step as views of `memory` (uint8); slots [groups, rows]."""
    views, at = {}, 0
    shapes = [(name, rows * (groups if name == "slots" else 1), dtype) for name, dtype in ROWS]
    for name, count, dtype in (*shapes, ("cu_q", seqs + 1, np.int32), ("context", seqs, np.int32)):
        end = at + count * np.dtype(dtype).itemsize
        views[name] = memory[at:end].view(torch.int64 if dtype is np.int64 else torch.int32)
        at = end
    return views | {"slots": views["slots"].view(groups, rows)}


def _size(rows: int, seqs: int, groups: int) -> int:
    numbers = sum(rows * np.dtype(dtype).itemsize for _, dtype in ROWS) + 4 * (2 * seqs + 1)
    return numbers + (groups - 1) * rows * np.dtype(np.int64).itemsize


class Arrays:
    """What the host fills and the ops read: one memory for both, where the ops run on the host.

    `tokens`: where the host does not know one yet, -1 - i for the i-th that the step before draws. `adapters`: the LoRA
    slots of rows, which the decoder's adapters read where they lie. `slots` [groups, tokens] and `block_tables`
    [groups, seqs, blocks] differ by group of layers; the tables keep their rows from step to step.
    """

    def __init__(
        self, max_tokens: int, max_seqs: int, max_blocks: int, rows: Tensor | None = None, groups: int = 1
    ) -> None:
        self.max_seqs, self.max_blocks = max_seqs, max_blocks
        self.block_tables = np.zeros((groups, max_seqs, max_blocks), np.int32)
        self._sizes = max_tokens, max_seqs, groups
        self._place(torch.zeros(_size(*self._sizes), dtype=torch.uint8), torch.from_numpy(self.block_tables))
        if rows is not None:
            self._views["adapters"] = rows
        self._use({name: view.numpy() for name, view in self._views.items()})

    def _place(self, memory: Tensor, tables: Tensor) -> None:
        """Let the ops read these."""
        self._memory, self._tables = memory, tables
        self._views = _cut(memory, *self._sizes)
        slots = self._views["slots"]
        self._of_group = [(slots[group], tables[group]) for group in range(len(tables))]

    def _use(self, host: dict[str, NDArray[Any]]) -> None:
        """Let the host fill these."""
        self.slots, self.tokens, self.positions = host["slots"], host["tokens"], host["positions"]
        self.logit_rows, self.adapters = host["logit_rows"], host["adapters"]
        self.cu_q, self.context = host["cu_q"], host["context"]

    def begin(self) -> None:
        """The host may write from here on."""

    def send(self, seqs: int, blocks: int) -> None:
        """The ops may read from here on: the arrays and the first `blocks` columns of `seqs` rows of the tables."""

    def keep_drawn(self, tokens: Found) -> None:
        """What a step drew, int32 [n], for the next one. The host, where nothing is ahead, knows it by then."""

    def take_drawn(self, tokens: int) -> None:
        """Part of a step: look up those of its `tokens` that the step before drew."""

    def batches(self, tokens: int, seqs: int, logits: int) -> list[Batch]:
        """Views of the filled part, as ops read them: a batch per group of layers."""
        v, (slots, tables) = self._views, self._of_group[0]
        first = Batch(
            tokens=v["tokens"][:tokens],
            positions=v["positions"][:tokens],
            slots=slots[:tokens],
            cu_q=v["cu_q"][: seqs + 1],
            context=v["context"][:seqs],
            block_tables=tables[:seqs],
            logit_rows=v["logit_rows"][:logits],
        )
        return [first, *(replace(first, slots=s[:tokens], block_tables=t[:seqs]) for s, t in self._of_group[1:])]


class CrossArrays(Arrays):
    """Arrays of an encoder-decoder. All but two are of the decoder's part of the sequences.

    `encoded` [seqs] int32: tokens of the encoder's part, which lies in the blocks `encoder_tables` [seqs, blocks].
    """

    def __init__(self, max_tokens: int, max_seqs: int, max_blocks: int) -> None:
        super().__init__(max_tokens, max_seqs, max_blocks)
        self.encoded, self.encoder_tables = np.ones(max_seqs, np.int32), np.zeros((max_seqs, max_blocks), np.int32)
        self._cross = torch.from_numpy(self.encoded), torch.from_numpy(self.encoder_tables)
        self._each = torch.arange(max_tokens + 1, dtype=torch.int32)

    def batches(self, tokens: int, seqs: int, logits: int) -> list[Batch]:
        """The one batch, in which each row is a sequence to cross attention: copied where sequences have several."""
        (batch,) = super().batches(tokens, seqs, logits)
        context, tables = (view[:seqs] for view in self._cross)
        if tokens != seqs:
            owners = torch.from_numpy(np.repeat(np.arange(seqs), np.diff(self.cu_q[: seqs + 1])))
            context, tables = context[owners], tables[owners]
        cross = replace(batch, cu_q=self._each[: tokens + 1], context=context, block_tables=tables)
        return [replace(batch, cross=cross)]


class _Buffer:
    """One of the two sets that a step's arrays go through: pinned on the host, and where they arrive on the device."""

    def __init__(self, runtime: Runtime, device: torch.device, sizes: tuple[int, int, int], cells: int) -> None:
        nbytes = _size(*sizes)
        self.host, self.host_tables = runtime.pinned(nbytes), runtime.pinned(4 * cells).view(torch.int32)
        self.arrays: dict[str, NDArray[Any]] = {name: v.numpy() for name, v in _cut(self.host, *sizes).items()}
        self.device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.device_tables = torch.zeros(cells, dtype=torch.int32, device=device)
        self.adapters = _cut(self.device, *sizes)["adapters"]
        self.sent: Mark | None = None
        self.read: Mark | None = None


class DeviceArrays(Arrays):
    """Arrays on a device: filled in pinned memory, copied beside the step that runs, and put in place between steps.

    There are two sets of buffers, taken in turn, so that the host fills the next step's while the copies of the last
    may still be under way; it waits for a set that the device has not read yet.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int],
        rows: Tensor | None,
        runtime: Runtime,
        device: torch.device,
        groups: int = 1,
    ) -> None:
        """`sizes`: most tokens, sequences, and blocks of a sequence. `rows` [tokens] int32: those of the adapters."""
        super().__init__(*sizes, groups=groups)
        cells = self.block_tables.size
        self._runtime = runtime
        self._buffers = tuple(_Buffer(runtime, device, self._sizes, cells) for _ in range(2))
        self._turn = 0
        tables = torch.zeros(self.block_tables.shape, dtype=torch.int32, device=device)
        self._place(torch.zeros(len(self._memory), dtype=torch.uint8, device=device), tables)
        self._drawn = torch.zeros(sizes[0], dtype=torch.int32, device=device)
        self._rows = rows
        self._use(self._buffers[0].arrays)

    def begin(self) -> None:
        """Take the other set of buffers, once the device has it no more."""
        self._turn = 1 - self._turn
        buffer = self._buffers[self._turn]
        if buffer.sent is not None:
            buffer.sent.wait()
        self._use(buffer.arrays)

    def send(self, seqs: int, blocks: int) -> None:
        """Queue the copies; the last step still reads the arrays' own memory, so they wait for it in buffers."""
        buffer, groups = self._buffers[self._turn], len(self.block_tables)
        cells = groups * seqs * blocks
        buffer.host_tables.numpy()[:cells] = self.block_tables[:, :seqs, :blocks].reshape(-1)
        copies = [(buffer.device, buffer.host)]
        if cells:
            copies.append((buffer.device_tables[:cells], buffer.host_tables[:cells]))
        buffer.sent = self._runtime.send(copies, buffer.read)
        placed = [(self._memory, buffer.device)]
        if cells:
            placed.append((self._tables[:, :seqs, :blocks], buffer.device_tables[:cells].view(groups, seqs, blocks)))
        if self._rows is not None:
            placed.append((self._rows, buffer.adapters))
        self._runtime.place(placed)
        buffer.read = self._runtime.mark()

    def keep_drawn(self, tokens: Found) -> None:
        """Queue a copy to where the next step looks, behind the step that runs."""
        drawn = torch.as_tensor(tokens)
        self._runtime.place([(self._drawn[: len(drawn)], drawn)])

    def take_drawn(self, tokens: int) -> None:
        """Queue it, or record it as a graph's first part."""
        take_drawn(self._views["tokens"][:tokens], self._drawn)
