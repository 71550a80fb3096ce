"""Drafting from one hidden row of the target a sequence: that which gave its last token."""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence
from typing import NamedTuple

from quire.core.plan import ChunkResult, StepPlan
from quire.core.sequence import Sequence
from quire.model.net.hidden_taps import picked
from quire.ops.arrays import Array
from quire.run.builder import wanted_rows
from quire.run.step import ModelStep


class HiddenRow(NamedTuple):
    """The hidden row that position `position` of a sequence gave: rows[at]."""

    position: int
    rows: Array
    at: int


class LastRowDrafter:
    """Keeps, for each sequence, the target's row that its last token was drawn from (`Taps` without `every`).

    A row of the last step alone is there: where a step ahead took its place there is no draft.
    """

    def __init__(self, target: ModelStep) -> None:
        self._hidden = target.hidden

    def ready(self, seq: Sequence) -> bool:
        """Whether the row of its last token is there."""
        kept = seq.draft.lookup
        return isinstance(kept, HiddenRow) and kept.position == len(seq.tokens) - 2

    def row_of(self, seq: Sequence) -> Array:
        """The row [1, width] of a sequence that is ready."""
        kept = seq.draft.lookup
        assert isinstance(kept, HiddenRow), "it is ready"
        return kept.rows[kept.at][None]

    def computed(self, plan: StepPlan, follow: bool, results: GenericSequence[ChunkResult] = ()) -> None:
        """Keep, for each sequence that got tokens, the row that the last of them was drawn from."""
        places, owners, at = [], [], 0
        for chunk, result in zip(plan.chunks, results, strict=False):
            wanted = wanted_rows(chunk)
            if result.tokens and not result.retry_without_draft and result.error is None:
                first = sum(target is not None for _, target in wanted)
                places.append(at + first + (result.path[-1] + 1 if result.path else 0))
                owners.append((chunk.seq, len(chunk.seq.tokens) + len(result.tokens) - 2))
            at += len(wanted)
        if places:
            rows = picked(self._hidden, places)
            for i, (seq, position) in enumerate(owners):
                seq.draft.lookup = HiddenRow(position, rows, i)
