"""Drafts by a model: a smaller one, the same checkpoint at fewer bits, or its first layers.

Leviathan et al. 2023, "Fast inference from transformers via speculative decoding"; Chen et al. 2023. Self-speculation:
Zhang et al. 2023, "Draft & verify". Each token is drawn with the request's own parameters and random numbers, so that a
draft that is right about the distribution says the token that the target will draw (Daliri et al. 2024).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as GenericSequence

import numpy as np

from quire.core.plan import Chunk, ChunkResult, LogitRow, StepPlan
from quire.core.sequence import Sequence
from quire.core.speculation import TreeForm
from quire.ops.arrays import Array
from quire.run.builder import BatchBuilder
from quire.run.step import ModelStep
from quire.sample.sampler import Sampler
from quire.speculate.tree import Candidates, grow_trees


class Drafter:
    """One row a sequence and pass: the model's tokens go through its decoder like any batch of decodes.

    This one writes into the target's own slots: what it leaves there is computed again by the verification, all of
    whose rows it precedes.
    """

    passes = True
    at_once = False
    seconds = 0.0

    def __init__(self, step: ModelStep, vocab_size: int, weight_bytes: int, form: TreeForm | None) -> None:
        """`vocab_size`: of the target; `form`: of drafts that branch."""
        self._form = form
        self._step, self._vocab_size, self.weight_bytes = step, vocab_size, weight_bytes
        self._sampler = Sampler(step.ops, vocab_size)
        self.longest = step.model.max_model_len
        self._builder = BatchBuilder(step.arrays, step.model, step.caches.block_size)

    def propose(self, seqs: GenericSequence[Sequence], limits: GenericSequence[int]) -> None:
        """One pass a token, of those that still want one; or a depth of their trees, whose rows are computed again."""
        wanting = [(seq, limit) for seq, limit in zip(seqs, limits, strict=True) if limit > 0]
        self._catch_up([seq for seq, _ in wanting])
        begin = time.perf_counter()
        if self._form is not None:
            grow_trees(self._form, wanting, self._candidates)
            wanting = []
        while wanting:
            starts = [
                self._first(seq) if not seq.draft.tokens else len(seq.tokens) - 1 + len(seq.draft.tokens)
                for seq, _ in wanting
            ]
            chunks = tuple(
                Chunk(seq, start, len(seq.tokens) + len(seq.draft.tokens) - start, 1)
                for (seq, _), start in zip(wanting, starts, strict=True)
            )
            for (seq, _), token in zip(wanting, self._draw(chunks), strict=True):
                if token >= 0:
                    seq.draft.tokens.append(token)
            self._wrote(chunks)
            wanting = [
                (seq, limit) for seq, limit in wanting if len(seq.draft.tokens) < limit and len(seq.draft.tokens)
            ]
        self.seconds = time.perf_counter() - begin

    def _candidates(self, seqs: list[Sequence], counts: list[int]) -> list[Candidates]:
        """What may follow the last nodes of drafts, or the last tokens."""
        assert self._form is not None
        starts = [len(seq.tokens) if seq.draft.tokens else self._first(seq) for seq in seqs]
        chunks = tuple(
            Chunk(seq, start, len(seq.tokens) + len(seq.draft.tokens) - start, count)
            for seq, start, count in zip(seqs, starts, counts, strict=True)
        )
        logits, rows = self._logits(chunks)
        tokens, chances = self._sampler.best(logits, rows, self._form.topk)
        if not seqs[0].draft.tokens:
            self._wrote(chunks)
        ends = np.cumsum(counts)[:-1]
        return [Candidates(*found) for found in zip(np.split(tokens, ends), np.split(chances, ends), strict=True)]

    def _draw(self, chunks: tuple[Chunk, ...]) -> list[int]:
        """The token after each chunk; -1 where the logits are no numbers."""
        return self._sampler.tokens(*self._logits(chunks))

    def _logits(self, chunks: tuple[Chunk, ...]) -> tuple[Array, list[LogitRow]]:
        """Logits of the rows of `chunks` that want any.

        Models with the same tokens may have tables padded to other sizes: ids that the target lacks are not drawn.
        """
        shape, rows = self._builder.fill(chunks)
        logits = self._step.forward(shape)
        if logits.shape[1] != self._vocab_size:
            known, whole = min(logits.shape[1], self._vocab_size), self._step.ops.zeros((len(logits), self._vocab_size))
            whole[:, :known], whole[:, known:] = logits[:, :known], -math.inf
            logits = whole
        return logits, rows

    def _first(self, seq: Sequence) -> int:
        """The first position that a draft of `seq` computes."""
        return len(seq.tokens) - 1

    def _catch_up(self, seqs: GenericSequence[Sequence]) -> None:
        """Compute what the model lacks of the tokens before the last."""

    def _wrote(self, chunks: tuple[Chunk, ...]) -> None:
        """Keys and values of `chunks` are there."""

    def ready(self, seq: Sequence) -> bool:
        """Always: what it lacks it computes."""
        return True

    def computed(self, plan: StepPlan, follow: bool, results: GenericSequence[ChunkResult] = ()) -> None:
        """The target's step wrote over all that was drafted."""


class ModelDrafter(Drafter):
    """A model of its own, whose layers are further layers of the same blocks.

    So a sequence that is preempted, forked or finds its prompt in the prefix cache takes this model's keys and values
    along. `_through` [blocks] says up to which of its slots a block holds them; what the target computed alone (while a
    batch was too large to draft for) is computed when drafts begin again, unless it slid out of a window of the layers.
    In the place of an image it reads tokens that say nothing, and guesses from the text (Gagrani et al. 2024, "On
    speculative decoding for multimodal large language models").
    """

    def __init__(self, step: ModelStep, vocab_size: int, weight_bytes: int, form: TreeForm | None) -> None:
        super().__init__(step, vocab_size, weight_bytes, form)
        self._size, self._room = step.caches.block_size, len(step.arrays.tokens)
        self._through = step.caches.through
        self._through[-1] = self._size  # SLID_OUT: nobody reads it
        self._tables, self._slides = step.caches.tables, any(step.model.spec.windows)

    def computed(self, plan: StepPlan, follow: bool, results: GenericSequence[ChunkResult] = ()) -> None:
        """What the target wrote and no draft said is not there yet; prompts are computed beside the target's."""
        for source, copy in plan.blocks.copies:
            self._through[copy] = self._through[source]
        for chunk in plan.chunks:
            first = self._stale(chunk)
            for i, block in self._blocks(chunk.seq, first, chunk.start + chunk.count):
                if self._through[block] > (held := max(0, first - i * self._size)):
                    self._through[block] = held
        if follow:
            own = (chunk for chunk in plan.chunks if chunk.seq.draft.enabled)
            self._catch_up([chunk.seq for chunk in own if self._follows(chunk)], plan)

    def _follows(self, chunk: Chunk) -> bool:
        """Whether a chunk of the target is computed at once: each of a prompt but its last one, which `propose`
        computes unless it may slide before."""
        end = chunk.start + chunk.count
        if self._slides:
            return chunk.count > 1 and end <= len(chunk.seq.tokens)
        return end < chunk.seq.prompt_len

    def ready(self, seq: Sequence) -> bool:
        """Whether what it lacks has not slid out of a window of its layers."""
        slid = max(seq.kv.slid[table] for table in self._tables) if seq.kv.blocks else 0
        return not slid or self._first(seq) >= slid * self._size

    def _stale(self, chunk: Chunk) -> int:
        """The first position of a chunk of the target whose keys and values no draft wrote as they are to be.

        Those of trees lie where their nodes were tried.
        """
        return chunk.start + (1 if chunk.seq.draft.tokens and chunk.seq.draft.parents else len(chunk.seq.draft.tokens))

    def _catch_up(self, seqs: GenericSequence[Sequence], plan: StepPlan | None = None) -> None:
        """Catch up in pieces that fit a step; up to what `plan` computes, or to the last token, which `propose` begins
        with."""
        ends = {} if plan is None else {c.seq: c.start + c.count for c in plan.chunks}
        lacking = [(seq, self._first(seq), ends.get(seq, len(seq.tokens) - 1)) for seq in seqs]
        lacking = [(seq, first, end) for seq, first, end in lacking if end - first > (plan is None)]
        while lacking:
            chunks, left, room = [], [], self._room
            for seq, first, end in lacking:
                count = min(room, end - first)
                if count:
                    chunks.append(Chunk(seq, first, count, 0))
                    room -= count
                if count < end - first:
                    left.append((seq, first + count, end))
            shape, _ = self._builder.fill(tuple(chunks))
            self._step.forward(shape)
            self._wrote(tuple(chunks))
            lacking = left

    def _first(self, seq: Sequence) -> int:
        """Where this model's keys and values of `seq` end: at the last token at most."""
        through = self._through[seq.kv.blocks[0]]
        block = int((through < self._size).argmax())
        end = block * self._size + int(through[block]) if through[block] < self._size else len(through) * self._size
        return min(len(seq.tokens) - 1, end)

    def _wrote(self, chunks: tuple[Chunk, ...]) -> None:
        for chunk in chunks:
            end = chunk.start + chunk.count
            for i, block in self._blocks(chunk.seq, chunk.start, end):
                self._through[block] = min(self._size, end - i * self._size)

    def _blocks(self, seq: Sequence, start: int, end: int) -> list[tuple[int, int]]:
        """(index, block) of those that hold positions start .. end - 1."""
        first, table = start // self._size, seq.kv.blocks[0] if seq.kv.blocks else []
        return list(enumerate(table[first : -(-end // self._size)], first))
