"""Random numbers that are a function of their name: a key and a counter, no state."""

from __future__ import annotations

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit words: ten rounds of Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int, stream: int) -> float:
    """A number in [0, 1) with 53 random bits; the key is the 64-bit seed, the counter (position, stream)."""
    words = philox4x32(
        (position & _MASK, position >> 32 & _MASK, stream & _MASK, stream >> 32 & _MASK),
        (seed & _MASK, seed >> 32 & _MASK),
    )
    return ((words[0] << 32 | words[1]) >> 11) * 2.0**-53
