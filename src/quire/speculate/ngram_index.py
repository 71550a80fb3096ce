"""Where the last tokens of a row came before, in that row or in others.

A hash chain, as in compressors: every occurrence of `least` tokens points to the one before it, so keeping the index
costs what is appended, and finding costs the few occurrences that are compared. Places and runs are plain integers:
a million small tuples would make Python's garbage collector stop the steps for tens of milliseconds.
"""

from __future__ import annotations

from typing import NamedTuple

CANDIDATES = 8
"""Earlier occurrences that are compared, the latest first."""
SPAN = 1 << 32
"""A place is the number of a row times this, and where in the row a run ends; 0 is none."""


class TokenRow:
    """Tokens that only grow, and for each end the place of the occurrence before it. `number`: 0 until it is read."""

    __slots__ = ("before", "number", "tokens")

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.before: list[int] = []
        self.number = 0


class NGramMatch(NamedTuple):
    """`row.tokens[:end]` ends with the last `length` tokens."""

    length: int
    row: TokenRow
    end: int


class NGramIndex:
    """Index of rows that grow: where each run of `least` tokens ended before; up to `most` tokens are compared."""

    __slots__ = ("_least", "_most", "_newest", "_rows", "_taken")

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._newest: dict[int, int] = {}
        self._rows: dict[int, TokenRow] = {}
        self._taken = 0

    def __len__(self) -> int:
        """Rows that are remembered."""
        return len(self._rows)

    def read(self, row: TokenRow) -> None:
        """Index what was appended to `row` since the last call."""
        if not row.number:
            self._taken += 1
            row.number = self._taken
            self._rows[row.number] = row
            row.before += [0] * self._least
        least, newest, before, tokens = self._least, self._newest, row.before, row.tokens
        base = row.number * SPAN
        for end in range(len(before), len(tokens) + 1):
            run = hash(tuple(tokens[end - least : end]))
            before.append(newest.get(run, 0))
            newest[run] = base + end

    def forget(self, row: TokenRow) -> None:
        """`row` is found no more, and its memory is given back."""
        least, newest, tokens = self._least, self._newest, row.tokens
        for end in range(least, len(row.before)):
            run = hash(tuple(tokens[end - least : end]))
            if newest.get(run, 0) // SPAN == row.number:
                del newest[run]
        self._rows.pop(row.number, None)
        row.before, row.tokens, row.number = [], [], -1

    def matches(self, row: TokenRow, within: bool = True) -> list[NGramMatch]:
        """Where what ends `row`, all of it read, was before: the longest first, the latest first among equals.

        `within`: in `row` itself too.
        """
        tokens, found = row.tokens, list[NGramMatch]()
        place = row.before[-1] if len(tokens) >= self._least and row.before else 0
        for _ in range(CANDIDATES):
            number, end = divmod(place, SPAN)
            at = self._rows.get(number)
            if at is None:
                break
            if within or at is not row:
                length = self._same(at.tokens, end, tokens)
                if length >= self._least:  # runs are told apart by their hashes
                    found.append(NGramMatch(length, at, end))
            place = at.before[end]
        found.sort(key=lambda match: -match.length)
        return found

    def _same(self, row: list[int], end: int, tokens: list[int]) -> int:
        """How many tokens before `end` and at the end of `tokens` are equal, up to `most`."""
        count, last = 0, len(tokens)
        most = min(self._most, end, last)
        while count < most and row[end - count - 1] == tokens[last - count - 1]:
            count += 1
        return count
