"""Sizes of a step's arrays, and of the steps that are captured as graphs on a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.core.plan import STORES

MAX_GRAPH_ROWS = 256
"""Rows of the largest graph: beyond it a step takes long enough to hide its launches."""
MAX_REPLAYED_ROWS = 128
"""Rows of the largest step that a CPU replays, each size from a recording of its own."""
MAX_RECORDINGS = 512
"""Recordings that a CPU keeps: with drafts, steps differ by rows and by sequences. One is some 100 KB for 16 layers."""
LOGITS_AT_ONCE = 256
"""Rows of logits that are made at once at least: fewer would read the output matrix too often."""


def graph_sizes(max_tokens: int, max_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, then every 8th up to 64 and every 16th up to `MAX_GRAPH_ROWS`.

    From 64 rows on padding is at most an eighth. None is larger than a step can be. The largest number of sequences is
    a size of its own, where below `MAX_GRAPH_ROWS`.
    """
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, MAX_GRAPH_ROWS + 1, 16), min(max_seqs, MAX_GRAPH_ROWS)}
    return tuple(sorted(size for size in sizes if size <= max_tokens))


def graph_bytes(sizes: tuple[int, ...], vocabulary: int) -> int:
    """Memory of the place of all graphs' logits. What lies between their ops is in a pool of theirs, to be measured."""
    return 4 * vocabulary * max(sizes, default=0)


def fitting(sizes: tuple[int, ...], tokens: int, seqs: int, logits: int, exact: bool) -> tuple[int, int]:
    """(rows, sequences) of the recording that computes a step of `tokens` rows; (0, 0) where none does.

    `exact`: only decodes and the rows of drafts, all of which want logits, as they are. Otherwise the smallest of
    `sizes` that holds it; decodes and chunks of prompts may be mixed, as a graph has room for as many sequences, and
    rows of logits, as rows.
    """
    if exact:
        return (tokens, seqs) if tokens == logits <= MAX_REPLAYED_ROWS else (0, 0)
    size = next((size for size in sizes if size >= tokens), 0)
    return size, size


WIDE = ("slots", "tree")
"""Arrays of int64."""


@dataclass(frozen=True)
class Sizes:
    """Most rows, sequences and blocks of a sequence in a step; groups of layers; whether there is an encoder, and
    whether layers have recurrent states."""

    rows: int
    seqs: int
    blocks: int
    groups: int = 1
    cross: bool = False
    states: bool = False

    @property
    def tables(self) -> tuple[int, int, int]:
        """Shape of the block tables: one per group, and the encoder's."""
        return self.groups + self.cross, self.seqs, self.blocks

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Array -> shape; all int32 but those of `WIDE`, which come first: so all stay aligned."""
        own = {"slots": (self.groups, self.rows), "tree": (self.rows,), "tokens": (self.rows,),
               "positions": (self.rows,), "logit_rows": (self.rows,), "adapters": (self.rows,),
               "logit_adapters": (self.rows,),
               "cu_q": (self.seqs + 1,), "context": (self.seqs,)}  # fmt: skip
        own |= {"owners": (self.rows,), "encoded": (self.seqs,)} if self.cross else {}
        stores = self.seqs, STORES
        return own | ({"state_from": (self.seqs,), "state_rows": stores, "state_to": stores} if self.states else {})

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(math.prod(shape) * (8 if name in WIDE else 4) for name, shape in self.shapes.items())
