"""Drafting from the target's hidden rows: what of them is kept, and when their keys are computed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass
from itertools import repeat

from quire.core.plan import Chunk, ChunkResult, StepPlan
from quire.core.sequence import Sequence
from quire.core.speculation import TreeForm
from quire.features.images.run_image_features import ImageFeatures
from quire.model.net.hidden_taps import picked
from quire.model.net.parts import Linear
from quire.ops.arrays import Array, concat
from quire.run.step import ModelStep
from quire.speculate.drafter import ModelDrafter

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
        pieces = [rows[first:stop] for rows, first, stop in self.pieces]
        return pieces[0] if len(pieces) == 1 else concat(pieces)


Work = list[tuple[Sequence, int, Array]]
"""Sequences, positions their rows begin at, and the rows."""


class HiddenDrafter(ModelDrafter):
    """Drafts by layers whose keys of position p are made of the target's hidden row of p.

    What the target computes is kept until it can be used: rows of prompts are computed at once, those of decodes with
    the next draft.
    """

    def __init__(
        self,
        step: ModelStep,
        target: ModelStep,
        fuse: Linear | None,
        form: TreeForm | None,
        features: ImageFeatures | None = None,
    ) -> None:
        """`fuse`: what joins tapped rows. `features`: of images, where these layers read embedded tokens."""
        super().__init__(step, target.model.spec.vocab_size, step.model.weight_bytes, form)
        self._fuse, self._hidden, self._features = fuse, target.hidden, features

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
        # A copy of what is left: a view would hold the rows of the whole step.
        start, done, left = kept.start, rows[:known], concat([rows[known:]])
        seq.draft.lookup = PendingHidden(start + len(done), kept.end, [(left, 0, len(left))] if len(left) else [])
        return [(seq, start, done)]

    def _standing(self, plan: StepPlan, follow: bool, results: GenericSequence[ChunkResult]) -> list[list[int]]:
        """Find of each chunk the rows of the step that are kept."""
        at, tried, found = 0, 0, list[list[int]]()
        for chunk, result in zip(plan.chunks, results or repeat(None), strict=False):
            wanted = chunk.seq.draft.enabled
            if not follow:
                wanted = wanted and chunk.start >= chunk.seq.prompt_len and tried < FOLLOWED
                tried += wanted
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
        work = [kept for seq, start, rows in work if len((kept := self._in_reach(seq, start, rows))[2])]
        while work:
            now, later, room = Work(), Work(), self._room
            for seq, start, rows in work:
                take = min(room, len(rows))
                if take:
                    now.append((seq, start, rows[:take]))
                if take < len(rows):
                    later.append((seq, start + take, rows[take:]))
                room -= take
            self._keys(now, self._fused(now[0][2] if len(now) == 1 else concat([rows for _, _, rows in now])))
            work = later

    def _in_reach(self, seq: Sequence, start: int, rows: Array) -> tuple[Sequence, int, Array]:
        """The rows of `seq` from `start` on whose keys have a place: not those that slid out of a window."""
        slid = max(seq.kv.slid[table] for table in self._tables) * self._size
        return seq, max(start, slid), rows[max(0, slid - start) :]

    def _fused(self, rows: Array) -> Array:
        """Hidden rows [n, hidden] of tapped ones [n, width]."""
        fuse = self._fuse
        return rows if fuse is None else self._step.ops.compute(lambda: fuse(self._step.ops, rows), together=False)

    @abstractmethod
    def _keys(self, work: Work, given: Array) -> None:
        """Compute keys and values of the positions of `work` from `given` [T, hidden], at most a step of them."""
