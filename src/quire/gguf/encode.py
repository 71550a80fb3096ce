"""Rows of numbers as ggml's block formats, with the rounding and the search for scales that ggml's own encoder has.

Simple formats round to a scale that the extremes of a block give. K formats try some twenty scales for a group and take
the one of least weighted squared error, each fitted by least squares to the codes it gives (`_fit_with_minimum`,
`_fit`); scales and minimums are then rounded to small multiples of those of the super-block, and codes anew to these.
Weights grow with a number's magnitude, as large numbers of a row matter more to its sums.

`quire.quant.gguf_decode` takes the formats apart; `quire.gguf.k_encode` holds the K formats.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from quire.core.config import cpu_count
from quire.core.errors import ModelError
from quire.gguf.block_types import BLOCKS
from quire.gguf.k_encode import (
    Bytes,
    Floats,
    halves,
    nibbles,
    q2_k,
    q3_k,
    q4_k,
    q5_k,
    q6_k,
    tops,
    weighted_between,
    weighted_signed,
)

CHUNK = 1 << 18
"""Numbers that are encoded at once: temporaries of twenty times their size stay small."""
SIZES = {kind.name: kind for kind in BLOCKS.values()}


def encode(rows: Floats, kind: str, importance: Floats | None = None) -> Bytes:
    """The bytes uint8 [n, bytes of a row] of rows [n, k] f32 in the format `kind` ("Q4_K"), a name of `ENCODERS`.

    `importance` [k] f32, 0 or more: how much the error of each column counts, in the formats of `WEIGHTED`.
    k is a whole number of blocks. `ModelError` for nan and inf, and for numbers that the format's float16 cannot hold.
    """
    n, k = rows.shape
    block = SIZES[kind]
    out = np.empty((n, k // block.numbers * block.nbytes), np.uint8)

    def work(start: int) -> bool:
        part = np.asarray(rows[start : start + step], np.float32)
        with np.errstate(all="ignore"):
            if not np.isfinite(part).all():
                return False
            blocks = part.reshape(-1, block.numbers)
            if importance is None or kind not in WEIGHTED:
                blocks = ENCODERS[kind](blocks)
            else:
                columns = np.broadcast_to(importance, part.shape).reshape(-1, block.numbers)
                blocks = WEIGHTED[kind](blocks, columns)
        out[start : start + step] = blocks.reshape(len(part), -1)
        return True

    step = max(1, CHUNK // k)
    with ThreadPoolExecutor(cpu_count()) as pool:
        finite = all([*pool.map(work, range(0, n, step))])
    if not finite:
        raise ModelError("a weight holds nan or inf and cannot be written as GGUF")
    return out


def _f32(x: Floats) -> Bytes:
    return x.astype("<f4").view(np.uint8)


def _f16(x: Floats) -> Bytes:
    return halves(x)


def _bf16(x: Floats) -> Bytes:
    """Rounded to the nearest, halves to even."""
    raw = x.astype("<f4").view(np.uint32)
    return ((raw + (0x7FFF + (raw >> 16 & 1))) >> 16).astype("<u2").view(np.uint8)


def _codes(x: Floats, scale: Floats, low: Any, half: float, most: int) -> Bytes:
    """(x - low) / scale + half cut off to whole codes 0..most; a scale of 0 gives `half` cut off."""
    inverse = np.where(scale != 0, np.float32(1) / scale, np.float32(0))
    codes: Bytes = np.clip((x - low) * inverse + np.float32(half), 0, most).astype(np.uint8)
    return codes


def _fifth(codes: Bytes) -> Bytes:
    """The fifth bits of 32 codes as 4 bytes."""
    return np.packbits(codes >> 4, axis=1, bitorder="little")


def _q8_0(x: Floats) -> Bytes:
    scale = np.abs(x).max(1, keepdims=True) / np.float32(127)
    scaled = x * np.where(scale != 0, np.float32(1) / scale, np.float32(0))
    whole = np.trunc(np.abs(scaled) + np.float32(0.5)) * np.sign(scaled)  # halves away from 0
    return np.concatenate((halves(scale), whole.astype(np.int8).view(np.uint8)), 1)


def _signed(x: Floats, half: int) -> tuple[Floats, Bytes]:
    """(scale, codes 0..2 * half - 1): the number of largest magnitude gets the code that has no opposite."""
    scale = tops(x) / np.float32(-half)
    return scale, _codes(x, scale, np.float32(0), half + 0.5, 2 * half - 1)


def _between(x: Floats, most: int) -> tuple[Floats, Floats, Bytes]:
    """(scale, minimum, codes 0..most) between the extremes of a block."""
    low = x.min(1, keepdims=True)
    scale = (x.max(1, keepdims=True) - low) / np.float32(most)
    return scale, low, _codes(x, scale, low, 0.5, most)


def _q4_0(x: Floats, importance: Floats | None = None) -> Bytes:
    scale, codes = _signed(x, 8) if importance is None else weighted_signed(x, importance, 8)
    return np.concatenate((halves(scale), nibbles(codes, 16)), 1)


def _q4_1(x: Floats, importance: Floats | None = None) -> Bytes:
    scale, low, codes = _between(x, 15) if importance is None else weighted_between(x, importance, 15)
    return np.concatenate((halves(scale), halves(low), nibbles(codes, 16)), 1)


def _q5_0(x: Floats, importance: Floats | None = None) -> Bytes:
    scale, codes = _signed(x, 16) if importance is None else weighted_signed(x, importance, 16)
    return np.concatenate((halves(scale), _fifth(codes), nibbles(codes & 15, 16)), 1)


def _q5_1(x: Floats, importance: Floats | None = None) -> Bytes:
    scale, low, codes = _between(x, 31) if importance is None else weighted_between(x, importance, 31)
    return np.concatenate((halves(scale), halves(low), _fifth(codes), nibbles(codes & 15, 16)), 1)


ENCODERS: dict[str, Callable[[Floats], Any]] = {
    "F32": _f32, "F16": _f16, "BF16": _bf16, "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0,
    "Q5_1": _q5_1, "Q2_K": q2_k, "Q3_K": q3_k, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k,
}  # fmt: skip
"""Format -> its blocks uint8 [blocks, bytes] from numbers [blocks, numbers of a block] f32."""
WEIGHTED: dict[str, Callable[[Floats, Floats], Any]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q2_K": q2_k, "Q3_K": q3_k, "Q4_K": q4_k, "Q5_K": q5_k,
    "Q6_K": q6_k,
}  # fmt: skip
"""Formats whose scales are searched for, and their blocks beside the importance of each number's column."""
