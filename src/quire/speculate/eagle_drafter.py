"""Drafts by one layer over the target's hidden rows; see `eagle` for what it is and where it comes from."""

from __future__ import annotations

import time
from collections.abc import Sequence as GenericSequence

import numpy as np
from numpy.typing import NDArray

from quire.core.plan import Chunk
from quire.core.sequence import Sequence
from quire.core.speculation import TreeForm
from quire.features.images.run_image_features import ImageFeatures
from quire.model.net.parts import Linear
from quire.ops.arrays import Array, concat
from quire.run.builder import StepSizes, ancestors
from quire.run.step import ModelStep
from quire.speculate.chains import grow_chains
from quire.speculate.eagle_decoder import EagleDecoder
from quire.speculate.head_file import spread
from quire.speculate.hidden_drafter import HiddenDrafter, PendingHidden, Work
from quire.speculate.tree import Candidates, best_after, grow_trees, nodes_of


class EagleDrafter(HiddenDrafter):
    """The layer's keys of position p are made of the target's hidden row of p and of token p + 1.

    Rows of decodes are computed in the pass that gives the first token of the next draft.
    """

    def __init__(
        self,
        step: ModelStep,
        decoder: EagleDecoder,
        target: ModelStep,
        ends: tuple[Linear | None, Array | None],
        form: TreeForm | None,
        features: ImageFeatures | None = None,
    ) -> None:
        """`ends`: what joins tapped rows, and the target's ids of the tokens that the layer knows. `features`: of
        images, where the target takes any."""
        super().__init__(step, target, ends[0], form, features)
        self._decoder, self._ids = decoder, ends[1]

    def propose(self, seqs: GenericSequence[Sequence], limits: GenericSequence[int]) -> None:
        """The first token with what the target computed last, the others a pass each of those that still want one."""
        wanting = [(seq, limit) for seq, limit in zip(seqs, limits, strict=True) if limit > 0]
        work: Work = []
        for seq, _ in wanting:
            assert isinstance(seq.draft.lookup, PendingHidden), "they are ready"
            work.append((seq, seq.draft.lookup.start, seq.draft.lookup.rows))
            seq.draft.lookup = None
        if not work:
            return
        if sum(len(rows) for _, _, rows in work) > self._room:
            self._write([(seq, start, rows[:-1]) for seq, start, rows in work if len(rows) > 1])
            work = [(seq, start + len(rows) - 1, rows[-1:]) for seq, start, rows in work]
        begin = time.perf_counter()
        last = np.cumsum([len(rows) for _, _, rows in work]) - 1
        given = self._fused(concat([rows for _, _, rows in work]))
        if self._form is not None:
            grow_trees(self._form, wanting, _Branches(self, self._form, work, given))
        else:
            grow_chains(self._sampler, wanting, _Chain(self, work, given, last))
        self.seconds = time.perf_counter() - begin

    def _keys(self, work: Work, given: Array) -> None:
        self._pass(work, given, [])

    def _pass(self, work: Work, given: Array, wanted: list[int]) -> Array:
        """The layer over `work`, reading `given` [T, hidden]: logits of the last `wanted` rows of each sequence.

        Keys from the target's rows stand; those of positions that a draft says are written over. Rows of a draft that
        branches are all its nodes.
        """
        chunks = tuple(Chunk(seq, start, len(rows), 0) for seq, start, rows in work)
        shape, _ = self._builder.fill(chunks)
        arrays, at, total = self._step.arrays, 0, 0
        for s, (seq, start, rows) in enumerate(work):
            stop = at + len(rows)
            arrays.tokens[at:stop] = (seq.tokens + seq.draft.tokens)[start + 1 : start + 1 + len(rows)]
            if seq.request.images:
                tokens = arrays.tokens[at:stop]
                tokens[tokens >= self._vocab_size] = 0
            if seq.draft.tokens and seq.draft.parents:
                masks, depths = ancestors(seq.draft.parents)
                arrays.tree[at:stop] = masks
                arrays.positions[at:stop] = arrays.positions[at] + depths
            if wanted:
                arrays.logit_rows[total : total + wanted[s]] = range(stop - wanted[s], stop)
                total += wanted[s]
            at = stop
        self._decoder.given[:at] = given
        seen = self._builder.image_chunks
        images = None if self._features is None or not seen else self._features.ahead(seen)
        logits = self._step.forward(StepSizes(shape.tokens, shape.seqs, total, shape.blocks, shape.tree), images)
        self._wrote(tuple(c for c in chunks if c.start + c.count < len(c.seq.tokens)))
        return spread(self._step.ops, logits, self._ids, self._vocab_size)


class _Chain:
    """What follows drafts: each pass is of the rows that the last one left. `last`: the last row of each sequence."""

    def __init__(self, drafter: EagleDrafter, work: Work, given: Array, last: NDArray[np.int64]) -> None:
        self._drafter, self._work, self._given, self._last = drafter, work, given, last

    def __call__(self, seqs: list[Sequence], places: list[int]) -> Array:
        """Implement `Advance`."""
        if places:
            given = self._given = self._drafter._decoder.kept[self._last[places]]
            self._work = [
                (seq, len(seq.tokens) - 2 + len(seq.draft.tokens), given[i : i + 1]) for i, seq in enumerate(seqs)
            ]
            self._last = np.arange(len(places))
        return self._drafter._pass(self._work, self._given, [1] * len(self._work))


class _Branches:
    """What may follow the nodes of trees: each pass is of all nodes so far, with the rows that the last one left."""

    def __init__(self, drafter: EagleDrafter, form: TreeForm, work: Work, given: Array) -> None:
        self._drafter, self._form, self._work, self._given = drafter, form, work, given
        self._roots: dict[Sequence, Array] = {}
        self._rows: dict[Sequence, Array] = {}

    def __call__(self, seqs: list[Sequence], counts: list[int]) -> list[Candidates]:
        """Propose candidates as `grow_trees` wants it."""
        drafter, first = self._drafter, not self._roots
        if not first:
            self._work = [(seq, len(seq.tokens) - 1, self._before(seq)) for seq in seqs]
            self._given = concat([rows for _, _, rows in self._work])
        logits = drafter._pass(self._work, self._given, counts)
        at = 0
        for seq, _, rows in self._work:
            left = concat([drafter._decoder.kept[at : at + len(rows)]])
            at += len(rows)
            if first:
                self._roots[seq] = left[-1:]
            else:
                self._rows[seq] = left
        return best_after(drafter._sampler, logits, nodes_of(seqs, counts), counts, self._form.topk)

    def _before(self, seq: Sequence) -> Array:
        """The rows before the nodes of `seq`."""
        root, rows = self._roots[seq], self._rows.get(seq)
        return concat(
            [root if parent < 0 or rows is None else rows[parent : parent + 1] for parent in seq.draft.parents]
        )
