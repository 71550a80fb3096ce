"""What encoders of blocks share: numbers [blocks, numbers of a block] and the bytes that they become."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.core.errors import ModelError

Floats = np.ndarray[Any, Any]
"""Of float32."""
Bytes = np.ndarray[Any, Any]
"""Of uint8."""


def halves(x: Floats) -> Bytes:
    """Float16 [b, c] as bytes [b, 2 * c]; `ModelError` for numbers beyond its range."""
    half = x.astype("<f2")
    if not np.isfinite(half).all():
        raise ModelError("a weight holds numbers beyond 65504, the largest of float16, which GGUF keeps scales in")
    return half.view(np.uint8)


def tops(x: Floats) -> Floats:
    """The number of largest magnitude of the last axis, its sign kept, the first of several: [..., 1]."""
    return np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)


def nibbles(codes: Bytes, run: int) -> Bytes:
    """Codes 0..15 [b, c] as bytes [b, c / 2]: of every 2 * `run` the first half lies in the low nibbles."""
    pairs = codes.reshape(len(codes), -1, 2, run)
    both: Bytes = pairs[:, :, 0] | pairs[:, :, 1] << 4
    return both.reshape(len(codes), -1)


def crumbs(codes: Bytes) -> Bytes:
    """Codes 0..3 [b, 256] as bytes [b, 64]: of every 128 the first 32 lie in the lowest bits, the next above them."""
    parts = codes.reshape(len(codes), 2, 4, 32)
    all_four: Bytes = parts[:, :, 0] | parts[:, :, 1] << 2 | parts[:, :, 2] << 4 | parts[:, :, 3] << 6
    return all_four.reshape(len(codes), 64)
