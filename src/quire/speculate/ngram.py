"""Prompt look-up: what followed the last tokens when they came before is guessed to follow again.

Saxena 2023, "Prompt lookup decoding"; Yang et al. 2023, "Inference with reference". `ngram_index.py`
finds it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as GenericSequence

from quire.core.plan import ChunkResult, StepPlan
from quire.core.sequence import Sequence
from quire.core.speculation import TreeForm
from quire.speculate.ngram_index import NGramIndex, NGramMatch, TokenRow


def repeated(follows: list[int], count: int) -> list[int]:
    """`count` tokens: a copy of what it makes goes on."""
    while len(follows) < count:
        follows += follows[: count - len(follows)]
    return follows


def graft(seq: Sequence, branch: list[int], most: int) -> None:
    """Add a branch to a draft of up to `most` tokens, from where it differs from those that are there."""
    node = -1
    for token in branch:
        known = next(
            (i for i, parent in enumerate(seq.draft.parents) if parent == node and seq.draft.tokens[i] == token), None
        )
        if known is None:
            if len(seq.draft.tokens) == most:
                return
            seq.draft.tokens.append(token)
            seq.draft.parents.append(node)
            known = len(seq.draft.tokens) - 1
        node = known


class OwnNGrams:
    """The runs of one sequence's own tokens."""

    __slots__ = ("_row", "_runs")

    def __init__(self, seq: Sequence, least: int, most: int) -> None:
        self._runs, self._row = NGramIndex(least, most), TokenRow(seq.tokens)

    def matches(self) -> list[NGramMatch]:
        """Where what the sequence ends with was before, in its own tokens."""
        self._runs.read(self._row)
        return self._runs.matches(self._row)


class NGram:
    """Drafts from the sequence's own tokens, prompt and output."""

    passes = False
    at_once = False
    longest = sys.maxsize
    weight_bytes = 0
    seconds = 0.0

    def __init__(self, least: int, most: int, form: TreeForm | None = None) -> None:
        self._least, self._most, self._form = least, most, form

    def propose(self, seqs: GenericSequence[Sequence], limits: GenericSequence[int]) -> None:
        """What followed the longest run that ends the row and was there before; a copy of what it makes repeats."""
        for seq, limit in zip(seqs, limits, strict=True):
            own = seq.draft.lookup
            if not isinstance(own, OwnNGrams):
                own = seq.draft.lookup = OwnNGrams(seq, self._least, self._most)
            found = own.matches()
            if self._form is None:
                for _, row, end in found[:1]:
                    seq.draft.tokens = repeated(row.tokens[end : end + limit], limit)
                continue
            for _, row, end in found[: self._form.topk]:
                depth = min(limit, self._form.depth)
                graft(seq, repeated(row.tokens[end : end + depth], depth), limit)

    def ready(self, seq: Sequence) -> bool:
        """Always: it needs the tokens alone."""
        return True

    def computed(self, plan: StepPlan, follow: bool, results: GenericSequence[ChunkResult] = ()) -> None:
        """Nothing is kept of it."""
