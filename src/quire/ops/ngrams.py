"""Embeddings of n-grams: which rows of a table the last tokens of a row name (Qwen4-Exp)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.ops.arrays import Array

DIGITS = 3
"""To the base 256, of which the numbers of tokens are told: each of them is exact in bf16."""


@dataclass(frozen=True, eq=False)
class NgramHash:
    """Where n-grams lie: of 2, 3, ... n tokens, as many places for each length.

    `factors` [n] int64: what tokens are multiplied with, the last one first; `tables` [2, heads] int64: how many rows
    there are for each place, and the first of them. N-grams reach back to the token `end`, which none has but as its
    last one; where one is shorter, `end` stands for what it lacks.
    """

    factors: Array
    tables: Array
    end: int

    @property
    def tokens(self) -> int:
        """Tokens of the longest n-gram."""
        return int(self.factors.shape[0])

    @property
    def heads(self) -> int:
        """Places of all lengths."""
        return int(self.tables.shape[1])
