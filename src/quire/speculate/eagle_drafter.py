"""Drafts by one layer over the target's hidden rows; see `eagle` for what it is and where it comes from."""

from __future__ import annotations

import time
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from quire.core.plan import Chunk, ChunkResult, LogitRow, StepPlan
from quire.core.sequence import Sequence
from quire.core.speculation import TreeForm
from quire.features.images.run_image_features import ImageFeatures
from quire.model.net.hidden_taps import picked
from quire.model.net.parts import Linear
from quire.ops.arrays import Array, concat
from quire.run.builder import StepSizes, ancestors
from quire.run.step import ModelStep
from quire.speculate.drafter import ModelDrafter
from quire.speculate.eagle_decoder import EagleDecoder
from quire.speculate.head_file import spread
from quire.speculate.tree import Candidates, grow_trees

MOST_KEPT = 64
"""Hidden rows of a sequence that wait for a draft; with more, their keys are computed without one."""
FOLLOWED = 2
"""Sequences of a step, the first of them, that drafts may be tried on after a rest."""
HOLES = 32
"""Positions whose keys may be missing: those of rows that nobody waited for. With more a draft is not worth it."""


@dataclass(slots=True)
class PendingHidden:
    """Hidden rows of a sequence's positions `start` to `end`, whose keys the layer does not have yet.

    They stay where they were kept, step by step: rows [n, width] of a step, of which `first` to `stop` are meant. To
    put them together for every sequence in every step took as long as a step of a small model.
    """

    start: int
    end: int
    pieces: list[tuple[Array, int, int]]

    @property
    def rows(self) -> Array:
        """All hidden rows [end - start, width]."""
        return concat([rows[first:stop] for rows, first, stop in self.pieces])


Work = list[tuple[Sequence, int, Array]]
"""Sequences, positions their rows begin at, and the rows."""


class EagleDrafter(ModelDrafter):
    """The layer's keys of position p are made of the target's hidden row of p and of token p + 1.

    What the target computes is kept until the tokens after it are known: those of prompts are computed at once, those
    of decodes with the next draft, in the pass that gives its first token.
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
        super().__init__(step, target.model.spec.vocab_size, step.model.weight_bytes, form)
        self._decoder, (self._fuse, self._ids) = decoder, ends
        self._hidden, self._features = target.hidden, features

    def ready(self, seq: Sequence) -> bool:
        """Whether the hidden row before its last token is there, and the keys of nearly all before."""
        found = seq.draft.lookup
        if (
            not isinstance(found, PendingHidden)
            or found.start > len(seq.tokens) - 2
            or found.end != len(seq.tokens) - 1
        ):
            return False
        return self._missing(seq, found.start) <= HOLES

    def _missing(self, seq: Sequence, end: int) -> int:
        """How many positions before `end` have no keys of the layer."""
        blocks = seq.kv.blocks[0][: -(-end // self._size)]
        return end - min(end, int(self._through[blocks].sum()))

    def _stale(self, chunk: Chunk) -> int:
        """Number of stale rows, all of the draft: what a draft wrote came of the layer's own rows."""
        return chunk.start

    def computed(self, plan: StepPlan, follow: bool, results: GenericSequence[ChunkResult] = ()) -> None:
        """Keep the hidden rows of `plan` that stand; those of prompts only where drafts are likely to come.

        While drafts rest, `FOLLOWED` of the sequences are.
        """
        super().computed(plan, follow=False)
        stands = self._standing(plan, follow, results)
        places = [place for found in stands for place in found]
        rows, first, work = picked(self._hidden, places) if places else self._hidden[:0], 0, Work()
        for chunk, found in zip(plan.chunks, stands, strict=True):
            seq, stop, kept = chunk.seq, first + len(found), chunk.seq.draft.lookup
            if not found:
                seq.draft.lookup = None
                continue
            if isinstance(kept, PendingHidden) and kept.end == chunk.start:
                kept.end += len(found)
                kept.pieces.append((rows, first, stop))
            else:
                kept = seq.draft.lookup = PendingHidden(chunk.start, chunk.start + len(found), [(rows, first, stop)])
            if chunk.start < seq.prompt_len or kept.end - kept.start > MOST_KEPT:
                work += self._settled(seq, kept)
            first = stop
        self._write(work)

    def _settled(self, seq: Sequence, kept: PendingHidden) -> Work:
        """The rows whose next tokens are known: their keys are to be computed now."""
        known, rows = len(seq.tokens) - 1 - kept.start, kept.rows
        if self._features is not None and seq.request.images:  # a row waits for the features that it is to read
            known = self._features.known(seq, kept.start + 1, kept.start + 1 + min(known, len(rows)))
        if known <= 0:
            return []
        start, done, left = kept.start, rows[:known], rows[known:]
        seq.draft.lookup = PendingHidden(start + len(done), kept.end, [(left, 0, len(left))] if len(left) else [])
        return [(seq, start, done)]

    def _standing(self, plan: StepPlan, follow: bool, results: GenericSequence[ChunkResult]) -> list[list[int]]:
        """Find of each chunk the rows of the step that are kept."""
        at, found = 0, list[list[int]]()
        for chunk, result in zip(plan.chunks, results or repeat(None), strict=False):
            wanted = follow or (chunk.start >= chunk.seq.prompt_len and len(found) < FOLLOWED)
            wanted = wanted and chunk.seq.draft.enabled
            if not wanted or result is None or result.error is not None or result.retry_without_draft:
                found.append([])
            elif chunk.seq.draft.tokens:
                found.append([at + chunk.again, *(at + chunk.again + 1 + node for node in result.path)])
            else:
                found.append([*range(at + chunk.again, at + chunk.rows)])
            at += chunk.rows
        return found

    def _write(self, work: Work) -> None:
        """Compute the layer's keys of `work`, in pieces that fit a step."""
        while work:
            now, later, room = Work(), Work(), self._room
            for seq, start, rows in work:
                take = min(room, len(rows))
                if take:
                    now.append((seq, start, rows[:take]))
                if take < len(rows):
                    later.append((seq, start + take, rows[take:]))
                room -= take
            self._pass(now, self._fused(concat([rows for _, _, rows in now])), [])
            work = later

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
            wanting = []
        while wanting:
            logits = self._pass(work, given, [1] * len(work))
            asked = [
                LogitRow(seq, len(seq.tokens) + len(seq.draft.tokens), None, len(seq.draft.tokens) - 1)
                for seq, _ in wanting
            ]
            left = []
            for i, token in enumerate(self._sampler.tokens(logits, asked)):
                seq, limit = wanting[i]
                if token >= 0:
                    seq.draft.tokens.append(token)
                    if len(seq.draft.tokens) < limit:
                        left.append(i)
            if not left:
                break
            given = self._decoder.kept[last[left]]
            wanting = [wanting[i] for i in left]
            work = [
                (seq, len(seq.tokens) - 2 + len(seq.draft.tokens), given[i : i + 1])
                for i, (seq, _) in enumerate(wanting)
            ]
            last = np.arange(len(left))
        self.seconds = time.perf_counter() - begin

    def _fused(self, rows: Array) -> Array:
        """Hidden rows [n, hidden] of tapped ones [n, width]."""
        fuse = self._fuse
        return rows if fuse is None else self._step.ops.compute(lambda: fuse(self._step.ops, rows), together=False)

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
        asked = [
            LogitRow(seq, len(seq.tokens) + len(seq.draft.branch(node)), None, node)
            for seq, count in zip(seqs, counts, strict=True)
            for node in range(len(seq.draft.tokens) - count, len(seq.draft.tokens))
        ]
        tokens, chances = drafter._sampler.best(logits, asked, self._form.topk)
        ends = np.cumsum(counts)[:-1]
        return [Candidates(*found) for found in zip(np.split(tokens, ends), np.split(chances, ends), strict=True)]

    def _before(self, seq: Sequence) -> Array:
        """The rows before the nodes of `seq`."""
        root, rows = self._roots[seq], self._rows.get(seq)
        return concat(
            [root if parent < 0 or rows is None else rows[parent : parent + 1] for parent in seq.draft.parents]
        )
