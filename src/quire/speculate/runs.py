"""Where the last tokens of a row came before, in that row or in others.

A hash chain, as in compressors: every occurrence of `least` tokens points to the one before it, so keeping the index
costs what is appended, and finding costs the few occurrences that are compared.
"""

from __future__ import annotations

from typing import NamedTuple

CANDIDATES = 8
"""Earlier occurrences that are compared, the latest first."""


class Row:
    """Tokens that only grow, and for each end the occurrence before it; both are empty once it was forgotten."""

    __slots__ = ("before", "tokens")

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.before: list[tuple[Row, int] | None] = []


class Match(NamedTuple):
    """`row.tokens[:end]` ends with the last `length` tokens."""

    length: int
    row: Row
    end: int


class Runs:
    """Of rows that grow: where each run of `least` tokens ended before; up to `most` tokens are compared.

    `held` rows are kept, as their owner counts.
    """

    __slots__ = ("_least", "_most", "_newest", "held")

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most, self.held = least, most, 0
        self._newest: dict[tuple[int, ...], tuple[Row, int]] = {}

    def read(self, row: Row) -> None:
        """Index what was appended to `row` since the last call."""
        least, newest, before, tokens = self._least, self._newest, row.before, row.tokens
        for end in range(len(before), len(tokens) + 1):
            if end < least:
                before.append(None)
                continue
            run = tuple(tokens[end - least : end])
            before.append(newest.get(run))
            newest[run] = (row, end)

    def forget(self, row: Row) -> None:
        """`row` is found no more, and its memory is given back."""
        least, newest, tokens = self._least, self._newest, row.tokens
        for end in range(least, len(row.before)):
            run = tuple(tokens[end - least : end])
            found = newest.get(run)
            if found is not None and found[0] is row:
                del newest[run]
        row.before, row.tokens = [], []

    def matches(self, row: Row, within: bool = True) -> list[Match]:
        """Where what ends `row`, all of it read, was before: the longest first, the latest first among equals.

        `within`: in `row` itself too.
        """
        if not row.before:
            return []
        place, found, tokens = row.before[-1], list[Match](), row.tokens
        for _ in range(CANDIDATES):
            if place is None or not place[0].before:
                break
            at, end = place
            if within or at is not row:
                found.append(Match(self._same(at.tokens, end, tokens), at, end))
            place = at.before[end]
        found.sort(key=lambda match: -match.length)
        return found

    def _same(self, row: list[int], end: int, tokens: list[int]) -> int:
        """How many tokens before `end` and at the end of `tokens` are equal, up to `most`."""
        count, last = self._least, len(tokens)
        most = min(self._most, end, last)
        while count < most and row[end - count - 1] == tokens[last - count - 1]:
            count += 1
        return count
