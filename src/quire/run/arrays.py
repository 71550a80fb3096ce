"""The arrays of a step at fixed addresses, so that a recorded step can be replayed on new contents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import I32, I64
from quire.core.plan import StateStep
from quire.model.batch import Batch
from quire.ops.arrays import Array, view_as
from quire.ops.backend import Ops
from quire.ops.recurrent import StateBatch
from quire.ops.sampling import Found
from quire.run.step_sizes import MAX_REPLAYED_ROWS, WIDE, Sizes

NO_ARRAYS: Mapping[str, Array] = {}


def cut(sizes: Sizes, memory: Any) -> dict[str, Any]:
    """The arrays of `sizes` as views of `memory` (uint8)."""
    views, at = {}, 0
    for name, shape in sizes.shapes.items():
        dtype = I64 if name in WIDE else I32
        end = at + math.prod(shape) * dtype.itemsize
        views[name] = view_as(memory[at:end], dtype).reshape(*shape)
        at = end
    return views


class StateArrays:
    """What a step does with recurrent states, as the host writes it; arrays as of `quire.ops.recurrent.StateBatch`."""

    def __init__(self, host: Mapping[str, NDArray[Any]]) -> None:
        self._source, self._rows, self._slots = host["state_from"], host["state_rows"], host["state_to"]

    def write(self, s: int, step: StateStep) -> None:
        """Write the part of sequence `s` of the step."""
        self._source[s] = step.source
        self._slots[s] = -1
        for i, (rows, slot) in enumerate(step.stores):
            self._rows[s, i], self._slots[s, i] = rows, slot

    def parts(self, seqs: int) -> list[NDArray[Any]]:
        """What is written of the first `seqs` sequences."""
        return [self._source[:seqs], self._rows[:seqs], self._slots[:seqs]]

    def none_behind(self, seqs: int) -> None:
        """Sequences behind the first `seqs` are padding, and store nothing."""
        self._source[seqs:] = self._slots[seqs:] = -1


class Arrays:
    """What the host fills and the ops read: one memory for both, where the ops run on the host.

    `tokens`: where the host does not know one yet, -1 - i for the i-th that the step before draws. `adapters`: the LoRA
    slots of rows, which the decoder's adapters read where they lie, and `logit_adapters` those of rows of logits.
    `slots` [groups, tokens] and `block_tables` [groups, seqs, blocks] differ by group of layers; the tables keep their
    rows from step to step.

    With an encoder, all but two are of the decoder's part of the sequences. `encoded` [seqs]: tokens of the encoder's
    part, which lies in the blocks of the last of the tables; 1 where the host says nothing.
    """

    keeps_drawn = False
    """Whether what a step draws is known to the device before it is to the host."""

    def __init__(self, sizes: Sizes, ops: Ops, own: Mapping[str, Array] = NO_ARRAYS) -> None:
        """`own`: arrays that lie elsewhere, where the decoder's adapters read them."""
        self.max_seqs, self.max_blocks = sizes.seqs, sizes.blocks
        self.block_tables = np.zeros(sizes.tables, np.int32)
        self.sizes = sizes
        memory = np.zeros(sizes.nbytes, np.uint8)
        self._place(ops, ops.share(memory), ops.share(self.block_tables))
        self._views |= own
        self._use(cut(sizes, memory) | {name: ops.host(array) for name, array in own.items()})
        self.encoded[:] = 1

    def _place(self, ops: Ops, memory: Any, tables: Any) -> None:
        """Have batches be views of `memory` and `tables`, where the ops read: the host's own memory on a CPU."""
        self._memory, self._tables = memory, tables
        self._views = cut(self.sizes, memory)
        self._of_group = list(zip(self._views["slots"], tables, strict=False))
        self._each = ops.put(np.arange(self.sizes.rows + 1 if self.sizes.cross else 0, dtype=np.int32))
        rows = MAX_REPLAYED_ROWS if self.sizes.cross else 0
        self._seen: Any = ops.put(np.zeros(rows, np.int32))
        self._seen_tables: Any = ops.put(np.zeros((rows, self.sizes.blocks), np.int32))

    def _use(self, host: dict[str, NDArray[Any]]) -> None:
        """Name the arrays of `host`, which the host fills."""
        self.slots, self.tokens, self.positions = host["slots"], host["tokens"], host["positions"]
        self.logit_rows = host["logit_rows"]
        self.adapters, self.logit_adapters = host["adapters"], host["logit_adapters"]
        self.cu_q, self.context, self.tree = host["cu_q"], host["context"], host["tree"]
        self.encoded = host.get("encoded", self.context[:0])
        self.states = StateArrays(host) if self.sizes.states else None

    def begin(self) -> None:
        """The host may write from here on."""

    def send(self, seqs: int, blocks: int) -> None:
        """The ops may read from here on: the arrays and the first `blocks` columns of `seqs` rows of the tables."""

    def keep_drawn(self, tokens: Sequence[Found]) -> None:
        """What a step drew, int32 [n] each, for the next one, where that `keeps_drawn`."""

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
        if self.states is not None:
            parts += self.states.parts(seqs)
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
            states=self._states(seqs),
        )
        if self.sizes.cross:
            context, encoded = self._of_rows(tokens, seqs)
            cross = replace(first, cu_q=self._each[: tokens + 1], context=context, block_tables=encoded)
            first = replace(first, cross=cross)
        return [first, *(replace(first, slots=s[:tokens], block_tables=t[:seqs]) for s, t in self._of_group[1:])]

    def _states(self, seqs: int) -> StateBatch | None:
        """What the step does with the recurrent states of its sequences."""
        v = self._views
        if not self.sizes.states:
            return None
        return StateBatch(v["cu_q"][: seqs + 1], v["state_from"][:seqs], v["state_rows"][:seqs], v["state_to"][:seqs])

    def spread(self, tokens: int, seqs: int) -> None:
        """Copy the encoder's parts to where each row of a step finds its own, if its sequences have several rows."""
        if self.sizes.cross and tokens != seqs:
            self._of_rows(tokens, seqs)

    def _of_rows(self, tokens: int, seqs: int) -> tuple[Array, Array]:
        """The encoder's part as each row sees it, (tokens of it, their blocks): copies where sequences have several, at
        fixed addresses in steps that may be recorded."""
        context, tables = self._views["encoded"][:seqs], self._tables[-1, :seqs]
        if tokens == seqs:
            return context, tables
        owners = self._owners(seqs)
        if tokens > MAX_REPLAYED_ROWS:
            return context[owners], tables[owners]
        seen = self._seen[:tokens], self._seen_tables[:tokens]
        seen[0][...], seen[1][...] = context[owners], tables[owners]
        return seen

    def _owners(self, seqs: int) -> NDArray[Any]:
        """The sequence of each row."""
        return np.repeat(np.arange(seqs), np.diff(self.cu_q[: seqs + 1]))
