"""Which of several holders has which blocks of a sequence: whole splits of keys, in turn.

Attention folds what it has of `SPLIT` keys at a time, so a split that one holder has whole leaves the same bits as in
one cache. A holder is a lane; where there is one, all blocks are of lane 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.parallel import SPLIT


@dataclass(frozen=True)
class Lanes:
    """`count` holders of blocks of `block_size` tokens. Block ids name them: id % count is the lane of a block."""

    count: int
    block_size: int

    @property
    def run(self) -> int:
        """Blocks next to each other in a sequence that are of one lane."""
        return max(1, SPLIT // self.block_size)

    def of(self, index: int) -> int:
        """The lane of the block of that index in its sequence's table."""
        return index // self.run % self.count

    def spread(self, blocks: int) -> list[int]:
        """How many of the first `blocks` of a table are of each lane."""
        turns, rest = divmod(blocks, self.run * self.count)
        return [turns * self.run + min(max(0, rest - lane * self.run), self.run) for lane in range(self.count)]

    def fullest(self, blocks: int) -> int:
        """The most of `blocks` neighbours of a table that are of one lane, wherever they begin."""
        turns, rest = divmod(blocks, self.run * self.count)
        return turns * self.run + min(rest, self.run)
