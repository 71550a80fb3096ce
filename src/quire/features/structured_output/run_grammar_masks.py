"""Rows whose tokens follow a grammar: their masks, made while the forward pass runs, and the tokens that are taken."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as GenericSequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quire.core.blame import Failed, fail
from quire.core.plan import LogitRow
from quire.core.sequence import Sequence, Status
from quire.ops.sampling import Ints, RowEdits
from quire.text.structured.guide import GrammarGuide

TRIES = 4
"""Tokens that are drawn and refused in one place before the next one of a known completion is taken."""


def guide_of(row: LogitRow) -> GrammarGuide | None:
    """Guide of the row's sequence, where a token is to be drawn."""
    guide = row.seq.guide
    if row.target is not None or row.seq.status is Status.FINISHED or not isinstance(guide, GrammarGuide):
        return None
    return guide


def _stand(guide: GrammarGuide, row: LogitRow) -> bool:
    """Have `guide` read what was said before `row`, drafted tokens included; False where it does not take all."""
    seq = row.seq
    return guide.follow(seq.tokens, seq.prompt_len, [seq.draft.tokens[node] for node in seq.draft.branch(row.node)])


class MaskBatch(NamedTuple):
    """Masks of rows, by their places, and the sequences whose guide failed."""

    masks: dict[int, Ints]
    failed: Failed


class MaskBuilder:
    """Makes masks of rows in a thread of its own, in which llguidance works without the interpreter's lock.

    They are made of the tokens alone, so they begin with the step where all of these are known, and else when it is
    sampled. On the reference's CPU a mask of 128,000 ids takes some 10 to 50 us.
    """

    def __init__(self, vocab_size: int) -> None:
        self._words = (vocab_size + 1 + 31) // 32  # llguidance's end is one more
        self._thread: ThreadPoolExecutor | None = None
        self._begun: dict[int, tuple[GenericSequence[LogitRow], Future[MaskBatch]]] = {}

    def begin(self, rows: GenericSequence[LogitRow]) -> None:
        """Begin with the masks of `rows`, if their tokens are known already; `of` the same list takes them.

        Of several steps under way each has its own.
        """
        guided = [row for row in rows if row.seq.guide is not None and guide_of(row) is not None]
        if not guided or any(row.node < 0 and row.position > len(row.seq.tokens) for row in guided):
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "masks")
        with suppress(RuntimeError):  # no thread can be started: `of` makes them
            self._begun[id(rows)] = rows, self._thread.submit(self._make, rows)

    def of(self, rows: GenericSequence[LogitRow]) -> MaskBatch:
        """The masks of those of `rows` that have any."""
        begun = self._begun.pop(id(rows), None)
        return self._make(rows) if begun is None else begun[1].result()

    def _make(self, rows: GenericSequence[LogitRow]) -> MaskBatch:
        made = MaskBatch({}, {})
        for place, row in enumerate(rows):
            guide = None if row.seq.guide is None else guide_of(row)
            if guide is None or row.seq in made.failed:
                continue
            began = time.thread_time()
            try:
                if _stand(guide, row):  # behind a draft that is refused no row counts
                    mask = np.empty(self._words, np.int32)
                    guide.mask(mask)
                    made.masks[place] = mask
                guide.took(time.thread_time() - began)
            except BaseException as error:
                fail(made.failed, row.seq, error, "grammar")
        return made


@dataclass(slots=True)
class _Pending:
    """A sequence whose rows were drawn: the one that is looked at, and how many tokens were refused there."""

    rows: dict[int, int]
    at: LogitRow
    refused: int = 0


Redraw = Callable[[list[RowEdits], list[int]], GenericSequence[int]]
"""Edits logits once more, and draws again for the rows of these places: their tokens."""


def settle(rows: GenericSequence[LogitRow], tokens: GenericSequence[int], redraw: Redraw, failed: Failed) -> None:
    """Have guides take the tokens that `rows` gave, -1 for none; what one refuses is drawn again, without that token.

    Of a draft's rows, those count whose drafted tokens were drawn before them. Sequences whose guide fails join
    `failed`, of which nothing is taken any more.
    """
    places: dict[Sequence, dict[int, int]] = {}
    for place, row in enumerate(rows):
        if guide_of(row) is not None and row.seq not in failed:
            places.setdefault(row.seq, {})[row.node] = place
    waiting = [_Pending(nodes, rows[nodes[-1]]) for nodes in places.values() if -1 in nodes]
    drawn = dict(enumerate(tokens))
    while waiting:
        edits: dict[int, tuple[RowEdits, _Pending]] = {}
        for pending in waiting:
            guide, began = guide_of(pending.at), time.thread_time()
            try:
                edit = _take(pending, rows, drawn)
                if guide is not None:
                    guide.took(time.thread_time() - began)
            except BaseException as error:
                fail(failed, pending.at.seq, error, "grammar")
                continue
            if edit is not None:
                edits[edit.row] = edit, pending
        again = sorted(edits)
        if again:
            drawn.update(zip(again, redraw([edits[row][0] for row in again], again), strict=True))
        waiting = [edits[row][1] for row in again if rows[row].seq not in failed]


def _take(pending: _Pending, rows: GenericSequence[LogitRow], drawn: dict[int, int]) -> RowEdits | None:
    """Take the tokens of a sequence's rows in turn; what to change where one is refused."""
    while True:
        row = pending.at
        place, guide = pending.rows[row.node], guide_of(row)
        token = drawn[place]
        if token < 0 or guide is None or not _stand(guide, row):
            return None
        if not guide.takes(token):
            pending.refused += 1
            if pending.refused < TRIES:
                return RowEdits(place, banned=np.array([token], np.int32))
            return RowEdits(place, allowed=np.array(guide.only, np.int32))
        follows = row.seq.draft.matching_child(row.node, token)
        if follows is None or follows not in pending.rows:
            return None
        pending.at, pending.refused = rows[pending.rows[follows]], 0
