"""Drafts that do not branch, by what says one token after the other."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as GenericSequence

from quire.core.plan import LogitRow
from quire.core.sequence import Sequence
from quire.ops.arrays import Array
from quire.sample.sampler import Sampler

Advance = Callable[[list[Sequence], list[int]], Array]
"""Sequences that go on, and which of those of the last call they are (none before the first) -> logits [n, V] of the
token that follows each draft."""


def grow_chains(sampler: Sampler, wanting: GenericSequence[tuple[Sequence, int]], advance: Advance) -> None:
    """Draft so many tokens for each sequence, a pass each of those that still want one.

    A draft ends where logits are no numbers.
    """
    going, places = [(seq, most) for seq, most in wanting if most > 0], list[int]()
    while going:
        logits = advance([seq for seq, _ in going], places)
        asked = [
            LogitRow(seq, len(seq.tokens) + len(seq.draft.tokens), None, len(seq.draft.tokens) - 1) for seq, _ in going
        ]
        places = []
        for i, token in enumerate(sampler.tokens(logits, asked)):
            seq, most = going[i]
            if token >= 0:
                seq.draft.tokens.append(token)
                if len(seq.draft.tokens) < most:
                    places.append(i)
        going = [going[i] for i in places]
