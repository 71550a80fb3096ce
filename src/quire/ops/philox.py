"""Random numbers that are a function of their name: a key and a counter, no state. See docs/design/determinism.md."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Word = Any
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[Word, Word, Word, Word], key: tuple[int, int]) -> tuple[Word, Word, Word, Word]:
    """Four 32-bit words: ten rounds of Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    A word is an int, or many of them in an array of uint64.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def noise(seed: int, position: int, stream: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """The number in (0, 1) of each token of `ids` [n], of 32 bits; the key is the 64-bit seed.

    A counter (position, stream, place) gives four words: token 64 b + 16 w + l has word w of place 16 b + l.
    """
    known = (position & _MASK, position >> 32 & _MASK, stream & _MASK)
    c0, c1, c2 = (np.full(len(ids), word, np.uint64) for word in known)
    c3 = (ids // 64 * 16 + ids % 16).astype(np.uint64)
    words = np.stack(philox4x32((c0, c1, c2, c3), (seed & _MASK, seed >> 32 & _MASK)))
    return (words[ids % 64 // 16, np.arange(len(ids))].astype(np.float64) + 0.5) * 2.0**-32
