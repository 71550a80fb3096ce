"""ggml's K formats: super-blocks of 256 numbers whose groups have small multiples of a scale and a minimum.

Searches follow ggml-quants.c (make_qkx2_quants, make_qx_quants, make_q3_quants), for all groups at once. What encoders
of all blocks share stands first: numbers [blocks, numbers of a block] and the bytes that they become.
"""

from __future__ import annotations

from dataclasses import dataclass
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


LEAST = np.float32(1e-15)
"""A group whose largest magnitude is smaller is all zeros."""


@dataclass(frozen=True)
class _Steps:
    """Scales to try: the extremes of a group are taken as (most + first + 0.1 * i) codes apart, i = 0..count."""

    most: int
    first: float
    count: int


def _rounded(x: Floats, low: int, high: int) -> Floats:
    whole: Floats = np.clip(np.rint(x), low, high)
    return whole


def _over(a: Any, b: Floats) -> Floats:
    """a / b, 0 where b is 0."""
    return np.where(b != 0, a / np.where(b != 0, b, np.float32(1)), np.float32(0))


def _numbers_first(x: Floats) -> Floats:
    """[numbers, ..., groups] of [..., groups, numbers].

    Sums over the first axis run over all groups at once: Q4_K takes 85 ns a number, and 160 with short sums over the
    last axis (2048 x 1024 normal numbers, one core).
    """
    return np.ascontiguousarray(np.moveaxis(x, -1, 0))


def _fit_with_minimum(x: Floats, weights: Floats, steps: _Steps, absolute: bool = False) -> tuple[Floats, Floats]:
    """(scale, minimum >= 0) [..., groups] of x [..., groups, numbers]: x is about scale * code - minimum.

    The fit is the weighted least squares one of the codes that each scale gives, from the best minimum so far on; the
    least error wins, of squares or `absolute` values.
    """
    x, weights = _numbers_first(x), _numbers_first(weights)
    high, least = x.max(0), np.minimum(x.min(0), np.float32(0))
    weighted_x = weights * x
    total, dot = weights.sum(0), weighted_x.sum(0)

    def error(scale: Floats, least: Floats, codes: Floats) -> Any:
        miss = scale * codes + least - x
        return (weights * (np.abs(miss) if absolute else miss * miss)).sum(0)

    codes = _rounded(_over(np.float32(steps.most), high - least) * (x - least), 0, steps.most)
    scale = (high - least) / np.float32(steps.most)
    best = error(scale, least, codes)
    for i in range(steps.count + 1):
        inverse = _over(np.float32(steps.first + 0.1 * i + steps.most), high - least)
        codes = _rounded(inverse * (x - least), 0, steps.most)
        weighted = weights * codes
        sum_l, sum_l2, sum_xl = weighted.sum(0), (weighted * codes).sum(0), (weighted_x * codes).sum(0)
        spread = total * sum_l2 - sum_l * sum_l
        own_scale = _over(total * sum_xl - dot * sum_l, spread)
        own_least = _over(sum_l2 * dot - sum_l * sum_xl, spread)
        above = own_least > 0
        own_scale = np.where(above, _over(sum_xl, sum_l2), own_scale)
        own_least = np.where(above, np.float32(0), own_least)
        own = error(own_scale, own_least, codes)
        better = (spread > 0) & (own < best)
        scale, least = np.where(better, own_scale, scale), np.where(better, own_least, least)
        best = np.where(better, own, best)
    return scale, -least


def _fit(x: Floats, half: int, weights: Floats | None = None) -> Floats:
    """The scale [..., groups] of x [..., groups, numbers], about scale * code with codes -half..half - 1.

    Errors are weighted by a number's square, or by `weights`. That with the least error has the largest
    (sum w x l)^2 / sum w l^2.
    """
    top = tops(x)[..., 0]
    x = _numbers_first(x)
    weights = x * x if weights is None else _numbers_first(weights)
    weighted_x = weights * x
    scale, best = np.zeros_like(top), np.zeros_like(top)
    for i in (0, *range(-9, 0), *range(1, 10)):
        codes = _rounded(_over(np.float32(-(half + 0.1 * i)), top) * x, -half, half - 1)
        dot, norm = (weighted_x * codes).sum(0), (weights * codes * codes).sum(0)
        better = (norm > 0) & (dot * dot > best * norm)
        scale = np.where(better, _over(dot, norm), scale)
        best = np.where(better, scale * dot, best)
    return np.where(np.abs(top) < LEAST, np.float32(0), scale)


def _descend(x: Floats, half: int, weights: Floats | None = None) -> Floats:
    """Fit codes: from one start, codes are changed one at a time while that lessens the error, five times through."""
    top = tops(x)[..., 0]
    x = _numbers_first(x)
    weights = x * x if weights is None else _numbers_first(weights)
    codes = _rounded(_over(np.float32(-half), top) * x, -half, half - 1)
    dot, norm = (weights * x * codes).sum(0), (weights * codes * codes).sum(0)
    for _ in range(5):
        for at, (own, w) in enumerate(zip(x, weights, strict=True)):
            code = codes[at]
            dot_less, norm_less = dot - w * own * code, norm - w * code * code
            new = _rounded(_over(own * norm_less, dot_less), -half, half - 1)
            dot_new, norm_new = dot_less + w * own * new, norm_less + w * new * new
            better = (dot_less > 0) & (new != code) & (norm_new > 0) & (dot_new * dot_new * norm > dot * dot * norm_new)
            codes[at] = np.where(better, new, code)
            dot, norm = np.where(better, dot_new, dot), np.where(better, norm_new, norm)
    return np.where(np.abs(top) < LEAST, np.float32(0), _over(dot, norm))


def _stored(x: Floats) -> Floats:
    """x as float16 holds it."""
    return x.astype(np.float16).astype(np.float32)


def _with_minimums(
    x: Floats, scale: Floats, least: Floats, most: int, largest: int
) -> tuple[Floats, Floats, Bytes, Bytes, Bytes]:
    """(unit, unit of minimums, multiples of both, codes 0..most) of x [b, groups, numbers]; multiples 0..`largest`."""
    parts: list[Any] = []
    for values in (scale, least):
        top = np.maximum(values.max(1, keepdims=True), np.float32(0))
        multiples = _rounded(_over(np.float32(largest), top) * values, 0, largest)
        parts.append((top / np.float32(largest), multiples))
    (unit, sub), (min_unit, min_sub) = parts
    step, low = (_stored(unit) * sub)[..., None], (_stored(min_unit) * min_sub)[..., None]
    codes = _rounded(_over(x + low, step), 0, most).astype(np.uint8).reshape(len(x), -1)
    return unit, min_unit, sub.astype(np.uint8), min_sub.astype(np.uint8), codes


def _symmetric(x: Floats, scale: Floats, low: int, half: int) -> tuple[Floats, Any, Bytes]:
    """(unit, multiples low..-low - 1 as int, codes 0..2 * half - 1) of x [b, groups, numbers]."""
    top = tops(scale)
    unit = top / np.float32(low)
    multiples = _rounded(_over(scale, unit), low, -low - 1)
    step = (_stored(unit) * multiples)[..., None]
    codes = _rounded(_over(x, step), -half, half - 1) + half
    return unit, multiples.astype(np.int8), codes.astype(np.uint8).reshape(len(x), -1)


def _six_bits(scales: Bytes, mins: Bytes) -> Bytes:
    """Eight multiples of 6 bits of scales and eight of minimums as 12 bytes."""
    low = scales[:, :4] | scales[:, 4:] >> 4 << 6
    mid = mins[:, :4] | mins[:, 4:] >> 4 << 6
    return np.concatenate((low, mid, scales[:, 4:] & 15 | mins[:, 4:] << 4), 1)


def _by_magnitude(x: Floats) -> Floats:
    """Weights of numbers: their magnitude and the root of the mean square of their group."""
    weights: Floats = np.sqrt((x * x).mean(-1, keepdims=True)) + np.abs(x)
    return weights


def _by_importance(x: Floats, importance: Floats, spread: int = 2) -> Floats:
    """Weights of numbers [b, groups, numbers]: the importance of their columns, and more of it for large numbers."""
    mean = np.float32(spread) * (x * x).mean((1, 2), keepdims=True)
    weights: Floats = importance.reshape(x.shape) * np.sqrt(mean + x * x)
    return weights


def weighted_signed(x: Floats, importance: Floats, half: int) -> tuple[Floats, Bytes]:
    """(scale [b, 1], codes 0..2 * half - 1) of blocks [b, numbers] of the least error by the columns' importance."""
    groups = x[:, None]
    scale = _fit(groups, half, _by_importance(groups, importance, 1))
    codes = _rounded(_over(x, _stored(scale)), -half, half - 1) + half
    return scale, codes.astype(np.uint8)


def weighted_between(x: Floats, importance: Floats, most: int) -> tuple[Floats, Floats, Bytes]:
    """(scale, minimum, codes 0..most) of blocks [b, numbers], as `weighted_signed`."""
    groups = x[:, None]
    scale, least = _fit_with_minimum(groups, _by_importance(groups, importance, 1), _Steps(most, -1.0, 20))
    codes = _rounded(_over(x + _stored(least), _stored(scale)), 0, most)
    return scale, -least, codes.astype(np.uint8)


def q2_k(x: Floats, importance: Floats | None = None) -> Bytes:
    """2 bits: groups of 16, multiples of 4 bits."""
    groups = x.reshape(len(x), 16, 16)
    weights = np.abs(groups) if importance is None else _by_importance(groups, importance, 1)
    scale, least = _fit_with_minimum(groups, weights, _Steps(3, -0.5, 15), importance is None)
    unit, min_unit, sub, min_sub, codes = _with_minimums(groups, scale, least, 3, 15)
    return np.concatenate((sub | min_sub << 4, crumbs(codes), halves(unit), halves(min_unit)), 1)


def q3_k(x: Floats, importance: Floats | None = None) -> Bytes:
    """3 bits: groups of 16, multiples of 6 bits, no minimums."""
    groups = x.reshape(len(x), 16, 16)
    weights = None if importance is None else _by_importance(groups, importance)
    unit, multiples, codes = _symmetric(groups, _descend(groups, 4, weights), -32, 4)
    sub = (multiples + 32).astype(np.uint8)
    high = np.packbits((codes >> 2).reshape(len(x), 8, 32).transpose(0, 2, 1), axis=-1, bitorder="little")[..., 0]
    tops_of = (sub >> 4).reshape(len(x), 4, 4)
    upper = tops_of[:, 0] | tops_of[:, 1] << 2 | tops_of[:, 2] << 4 | tops_of[:, 3] << 6
    return np.concatenate((high, crumbs(codes & 3), nibbles(sub & 15, 8), upper, halves(unit)), 1)


def q4_k(x: Floats, importance: Floats | None = None) -> Bytes:
    """4 bits: groups of 32, multiples of 6 bits."""
    groups = x.reshape(len(x), 8, 32)
    weights = _by_magnitude(groups) if importance is None else _by_importance(groups, importance)
    scale, least = _fit_with_minimum(groups, weights, _Steps(15, -1.0, 20))
    unit, min_unit, sub, min_sub, codes = _with_minimums(groups, scale, least, 15, 63)
    return np.concatenate((halves(unit), halves(min_unit), _six_bits(sub, min_sub), nibbles(codes, 32)), 1)


def q5_k(x: Floats, importance: Floats | None = None) -> Bytes:
    """5 bits: groups of 32, multiples of 6 bits."""
    groups = x.reshape(len(x), 8, 32)
    weights = _by_magnitude(groups) if importance is None else _by_importance(groups, importance)
    scale, least = _fit_with_minimum(groups, weights, _Steps(31, -0.5, 15))
    unit, min_unit, sub, min_sub, codes = _with_minimums(groups, scale, least, 31, 63)
    high = np.packbits((codes >> 4).reshape(len(x), 8, 32).transpose(0, 2, 1), axis=-1, bitorder="little")[..., 0]
    parts = (halves(unit), halves(min_unit), _six_bits(sub, min_sub), high, nibbles(codes & 15, 32))
    return np.concatenate(parts, 1)


def q6_k(x: Floats, importance: Floats | None = None) -> Bytes:
    """6 bits: groups of 16, multiples of 8 bits, no minimums."""
    groups = x.reshape(len(x), 16, 16)
    weights = None if importance is None else importance.reshape(groups.shape)
    unit, multiples, codes = _symmetric(groups, _fit(groups, 32, weights), -128, 32)
    parts = (nibbles(codes & 15, 64), crumbs(codes >> 4), multiples.view(np.uint8), halves(unit))
    return np.concatenate(parts, 1)
