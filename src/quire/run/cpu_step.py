"""Steps on the host: each small size is recorded when it first comes, and replayed on new contents.
See docs/design/steps.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from quire.model.net.decoder import Decoder
from quire.model.net.lora import NONE
from quire.model.net.multimodal import EmbeddedRows
from quire.ops.arrays import Array
from quire.ops.backend import Recording
from quire.run.builder import StepSizes
from quire.run.step import HeadRows, LocalStep
from quire.run.step_sizes import MAX_RECORDINGS, MAX_REPLAYED_ROWS


class Replayable(Protocol):
    """A step of one size that can be run again on what the arrays hold now.

    A `Recording`, or `tune.Trial`, which stands in its place until it has timed each setting.
    """

    def run(self) -> Array:
        """Compute the step; returns its logits [rows, V] f32."""
        ...


class CpuStep(LocalStep):
    """`recorded`: by (rows, sequences, whether a draft branches), of steps all of whose rows want logits."""

    recorded: dict[tuple[int, int, bool], Replayable]

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._texts: dict[tuple[int, int], Recording] = {}

    def head_rows(self, shape: StepSizes, given: EmbeddedRows | None = None) -> HeadRows:
        """Compute the rows [shape.logits, hidden] that the head reads. Calls of one short text of an encoder are
        recorded, by its length, and replayed: listing them takes a third of the time of a text of 16 tokens."""
        tokens, seqs, logits, *_ = shape
        kept = self._fixed and self.model.spec.bidirectional and seqs == 1 and tokens <= MAX_REPLAYED_ROWS
        if given is not None or shape.extended or not kept:
            return super().head_rows(shape, given)
        decoder, batches = self._decoder, self.arrays.batches(tokens, 1, logits)
        assert isinstance(decoder, Decoder), "others make no vectors"
        found = self._texts.get((tokens, logits))
        if found is None:
            found = self._texts[tokens, logits] = self.ops.record(lambda: self._decode(batches, scores=False))
            h = found.output
        else:
            h = found.run()
        return HeadRows(decoder, self.ops.copy_out(h), batches[0])

    def _replayed(self, shape: StepSizes) -> Array | None:
        tokens, seqs, logits, _, tree, _ = shape
        if not tokens == logits <= MAX_REPLAYED_ROWS:
            return None
        found = self.recorded.get((tokens, seqs, tree))
        if found is not None:
            self.arrays.spread(tokens, seqs)
            return found.run()
        return None if len(self.recorded) >= MAX_RECORDINGS else self.record(tokens, seqs, tree).output

    def record(self, rows: int, seqs: int, tree: bool = False) -> Recording:
        """Compute the step of `rows` rows of `seqs` sequences whose arrays are filled, and keep its recording."""
        batches = self.arrays.batches(rows, seqs, rows, tree)
        made = self.recorded[rows, seqs, tree] = self.ops.record(lambda: self._decode(batches))
        return made

    def warm_up(self, trees: bool = False) -> None:
        """Fault in what the first step touches: the decoder warms up on one prompt of made-up tokens.

        What that wrote is zeroed again.
        """
        arrays, size = self.arrays, self.caches.block_size
        blocks = min(self.caches.blocks, arrays.max_blocks, len(arrays.tokens) // size)
        longest = self.model.max_model_len - self.model.spec.encoder.room
        tokens = min(blocks * size, longest)  # the tables of positions end there, within a block or not
        if tokens < 1:
            return
        arrays.positions[:tokens] = arrays.slots[:, :tokens] = np.arange(tokens)
        arrays.block_tables[:, 0, :blocks] = np.arange(blocks)
        arrays.context[0] = arrays.cu_q[1] = tokens
        self.ops.begin_step()
        written = self.model.decoder.warm_up(arrays.batches(tokens, 1, 1)[0], self.caches.of_layer)
        self.caches.forget(blocks, written)

    def made_up_decode(self, rows: int) -> Callable[[], object]:
        """A decode step of `rows` sequences of one made-up token, to be timed; `forget_made_up` wipes its traces."""
        arrays = self.arrays
        arrays.tokens[:rows] = arrays.positions[:rows] = arrays.block_tables[:, :rows, 0] = 0
        arrays.slots[:, :rows] = np.arange(rows) % self.caches.block_size
        arrays.adapters[:rows] = NONE
        arrays.logit_rows[:rows] = np.arange(rows)
        arrays.cu_q[: rows + 1] = np.arange(rows + 1)
        arrays.context[:rows] = 1

        def decode() -> object:
            found = self.recorded.get((rows, rows, False))
            return self.record(rows, rows) if found is None else found.run()

        return decode

    def forget_made_up(self) -> None:
        """Zero the block that made-up steps wrote."""
        self.caches.forget(1)
