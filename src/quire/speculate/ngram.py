"""Prompt look-up: what followed the last tokens when they came before is guessed to follow again.

Saxena 2023, "Prompt lookup decoding"; Yang et al. 2023, "Inference with reference". The index is a hash chain, as in
compressors: every occurrence of `least` tokens points to the one before it, so a step costs what it appends.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as Rows

from quire.core.plan import ChunkResult, StepPlan
from quire.core.sequence import Sequence

CANDIDATES = 8
"""Earlier occurrences that are compared, the latest first."""


class Index:
    """Where each run of `least` tokens of a growing row ended before."""

    __slots__ = ("_before", "_heads", "_least", "_most")

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._heads: dict[tuple[int, ...], int] = {}
        self._before: list[int] = []

    def longest(self, tokens: list[int]) -> int:
        """Where the tokens that end `tokens` ended before: the longest such run, the latest among equals; 0 if none.

        `tokens` [n] is what it was at the last call and more.
        """
        least, heads, before = self._least, self._heads, self._before
        end = 0
        for end in range(len(before), len(tokens) + 1):
            run = tuple(tokens[end - least : end]) if end >= least else ()
            before.append(heads.get(run, 0) if run else 0)
            if run:
                heads[run] = end
        last, found, longest = len(tokens), 0, least - 1
        candidate = before[last]
        for _ in range(CANDIDATES):
            if not candidate:
                break
            length = self._same(tokens, candidate, last, longest)
            if length > longest:
                found, longest = candidate, length
                if length == self._most:
                    break
            candidate = before[candidate]
        return found

    def _same(self, tokens: list[int], a: int, b: int, longest: int) -> int:
        """How many tokens before `a` and `b` are equal, up to `most`; 0 where that is no more than `longest`."""
        if a <= longest or tokens[a - longest - 1] != tokens[b - longest - 1]:
            return 0
        count = self._least
        while count < self._most and count < a and tokens[a - count - 1] == tokens[b - count - 1]:
            count += 1
        return count


class NGram:
    """Drafts from the sequence's own tokens, prompt and output."""

    passes = False
    longest = sys.maxsize
    weight_bytes = 0
    seconds = 0.0

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most

    def propose(self, seqs: Rows[Sequence], limits: Rows[int]) -> None:
        """What followed the longest run that ends the row and was there before; a copy of what it makes repeats."""
        for seq, limit in zip(seqs, limits, strict=True):
            index = seq.lookup
            if not isinstance(index, Index):
                index = seq.lookup = Index(self._least, self._most)
            found = index.longest(seq.tokens)
            if found and limit:
                follows = seq.tokens[found : found + limit]
                while len(follows) < limit:
                    follows += follows[: limit - len(follows)]
                seq.draft = follows

    def ready(self, seq: Sequence) -> bool:
        """Always: it needs the tokens alone."""
        return True

    def computed(self, plan: StepPlan, follow: bool, results: Rows[ChunkResult] = ()) -> None:
        """Nothing is kept of it."""
