"""Sizes of latent attention."""

from __future__ import annotations

from dataclasses import dataclass

from quire.ops.indexer import NO_INDEXER, Indexer
from quire.ops.latents import EPS


@dataclass(frozen=True)
class MLA:
    """Sizes of multi-head latent attention (DeepSeek-AI 2024), all 0 for attention over keys and values per head.

    `q_rank`: of the space queries pass through, 0 = none; `rank`: of latents; `nope` and `rope`: parts of a query's
    head that do not and that do turn; `value`: of a head's result. `interleaved`: on disk, pairs (2i, 2i + 1) turn.
    `q_factor` and `factor` multiply what the norms of both spaces make. `indexer`: what chooses the tokens that are
    attended to, if not all are. `eps`: of both norms, and of one of the part of a key that turns, where there is one.
    """

    q_rank: int = 0
    rank: int = 0
    nope: int = 0
    rope: int = 0
    value: int = 0
    interleaved: bool = True
    indexer: Indexer = NO_INDEXER
    q_factor: float = 1.0
    factor: float = 1.0
    eps: float = EPS

    @property
    def row(self) -> int:
        """Numbers of what the cache keeps of a token: a latent, and the part of a key that turns."""
        return self.rank + self.rope


NO_LATENTS = MLA()
