"""The lightning indexer of sparse attention: which of the earlier tokens a row reads, and the cache of its keys.

DeepSeek-AI 2025, "DeepSeek-V3.2: pushing the frontier of open large language models". A score of each earlier token is
made of a few small heads, whose keys all heads share, and the tokens with the highest scores are attended to.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Indexer:
    """Sizes of the indexers of a model's layers, all 0 where it has none.

    `heads` of queries with `head_dim` numbers each; `most`: tokens that a row reads at most. `own`: per layer, whether
    it has an indexer; the others read what the last layer before them chose. `interleaved`: on disk, pairs (2i, 2i + 1)
    of its queries and keys turn.
    """

    heads: int = 0
    head_dim: int = 0
    most: int = 0
    own: tuple[bool, ...] = ()
    interleaved: bool = False

    def at(self, layer: int) -> bool:
        """Whether `layer` has an indexer of its own."""
        return bool(self.own) and self.own[layer]


NO_INDEXER = Indexer()
EPS = 1e-6
"""Of the norm of its keys, whatever config.json says of others."""
