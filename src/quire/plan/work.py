"""What a step computes, and who says how long that takes: the seam of planner, simulator and tuner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Chunk(NamedTuple):
    """`rows` tokens of one sequence that a step computes after `context` tokens whose keys and values are there.

    A decode is one row after all before it.
    """

    rows: int
    context: int


class StepTimes(Protocol):
    """Predicts steps of one engine (all of its ranks) on one machine."""

    def seconds(self, chunks: Sequence[Chunk]) -> float:
        """Of one step: forward, sampling, and what the host does beside; 0 chunks take 0."""
        ...
