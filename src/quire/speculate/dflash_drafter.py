"""Drafts of a block in one pass; see `dflash` for what it is and where it comes from."""

from __future__ import annotations

import time
from collections.abc import Sequence as GenericSequence

import numpy as np

from quire.core.plan import Chunk, LogitRow
from quire.core.sequence import Sequence
from quire.model.net.hidden_taps import picked
from quire.model.net.multimodal import EmbeddedRows
from quire.model.net.parts import Linear
from quire.ops.arrays import Array
from quire.run.builder import StepSizes
from quire.run.step import ModelStep
from quire.speculate.dflash_decoder import DFlashDecoder
from quire.speculate.hidden_drafter import HiddenDrafter, PendingHidden, Work

Wanting = list[tuple[Sequence, int]]
"""Sequences, and how many tokens to draft for each."""


class DFlashDrafter(HiddenDrafter):
    """A block begins with a sequence's last token; every further row stands for a token to come.

    Each row is a sequence of its own to the step. What a block leaves in the cache is written over, by the target's
    rows of the tokens that were kept.
    """

    at_once = True

    def __init__(
        self, step: ModelStep, decoder: DFlashDecoder, target: ModelStep, fuse: Linear, mask_token: int
    ) -> None:
        """`fuse`: joins tapped rows. `mask_token`: the id that stands for a token to come."""
        super().__init__(step, target, fuse, None)
        self._decoder, self._mask_token = decoder, mask_token
        self._most_rows = min(step.arrays.max_seqs, self._room)

    def propose(self, seqs: GenericSequence[Sequence], limits: GenericSequence[int]) -> None:
        """Write the keys of what the target computed since, then compute the blocks, as many as fit, at once."""
        wanting: Wanting = []
        work: Work = []
        for seq, limit in zip(seqs, limits, strict=True):
            if (count := min(limit, self._most_rows - 1)) > 0:
                pending = seq.draft.lookup
                assert isinstance(pending, PendingHidden), "they are ready"
                wanting.append((seq, count))
                work.append((seq, pending.start, pending.rows))
                seq.draft.lookup = None
        begin = time.perf_counter()
        self._write(work)
        while wanting:
            rows, now = 0, Wanting()
            while wanting and rows + 1 + wanting[0][1] <= self._most_rows:
                rows += 1 + wanting[0][1]
                now.append(wanting.pop(0))
            self._draft(now)
        self.seconds = time.perf_counter() - begin

    def _draft(self, wanting: Wanting) -> None:
        """The tokens of one pass: a row is drawn with the random numbers of its place, and ends a draft where it has
        none. Penalties do not see the tokens that the draft says before it."""
        logits = self._block(wanting)
        asked = [LogitRow(seq, len(seq.tokens) + i, None, -1) for seq, count in wanting for i in range(count)]
        tokens, at = self._sampler.tokens(logits, asked), 0
        for seq, count in wanting:
            drawn = tokens[at : at + count]
            seq.draft.tokens.extend(drawn[: drawn.index(-1)] if -1 in drawn else drawn)
            at += count

    def _block(self, wanting: Wanting) -> Array:
        """Logits of the rows that stand for tokens to come, of each sequence in turn."""
        places: list[int] = []
        chunks, ends, tokens = list[Chunk](), list[int](), list[int]()
        for seq, count in wanting:
            first = len(seq.tokens) - 1
            places += range(len(tokens) + 1, len(tokens) + 1 + count)
            chunks += [Chunk(seq, first + i, 1, 1) for i in range(1 + count)]
            ends += [first + 1 + count] * (1 + count)
            tokens += [seq.tokens[-1], *[self._mask_token] * count]
            seq.draft.tokens = [self._mask_token] * count  # the builder reads the tokens of positions to come there
        shape, _ = self._builder.fill(tuple(chunks))
        for seq, _ in wanting:
            seq.draft.tokens = []
        arrays, rows = self._step.arrays, len(tokens)
        arrays.tokens[:rows] = tokens
        arrays.logit_rows[:rows] = np.arange(rows)
        self._decoder.reach[:rows] = self._step.ops.put(np.array(ends, np.int32))
        self._decoder.reach[rows:] = 1  # of rows that pad a step
        logits = self._step.forward(StepSizes(rows, rows, rows, shape.blocks))
        return picked(logits, places)

    def _keys(self, work: Work, given: Array) -> None:
        chunks = tuple(Chunk(seq, start, len(rows), 0) for seq, start, rows in work)
        shape, _ = self._builder.fill(chunks)
        given = self._step.ops.copy_out(given)  # the step begins with the memory that they lie in
        rows = EmbeddedRows(np.arange(shape.tokens), given, np.zeros((3, 0), np.int64))
        self._step.forward(shape._replace(logits=0), rows)
        self._wrote(chunks)
