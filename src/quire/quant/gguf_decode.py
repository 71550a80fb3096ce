"""ggml's block formats taken apart: rows of bytes to integer codes, and a float scale and minimum per group.

The layouts are those of ggml-common.h and ggml-quants.c. Nothing is rounded: a scale that is the product of a float16
and a small integer is kept as float32, which holds it exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.ops.arrays import Host
from quire.ops.weights import SUPER
from quire.quant.codebook import MXFP4

IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The code book of IQ4_NL and IQ4_XS."""


@dataclass(frozen=True)
class SuperBlock:
    """A format whose scales are small multiples of a float16 that 256 columns share.

    `unit` and `min_unit` (negated; -1: none) are the bytes of a block at which these lie. Once packed, a code has
    `bits` and the scales and minimums of a group `multiples` bits.
    """

    bits: int
    multiples: int
    unit: int
    min_unit: int = -1

    def units(self, raw: Host) -> tuple[Host, Host | None]:
        """Units [r, blocks] float16 of scales and minimums, from bytes uint8 [r, blocks, bytes of a block]."""
        least = None if self.min_unit < 0 else -half(raw, self.min_unit)[..., 0]
        return half(raw, self.unit)[..., 0], least


@dataclass(frozen=True)
class Form:
    """`split` takes bytes uint8 [r, blocks, bytes of a block] apart into (codes [r, blocks, numbers], scales, mins).

    Value = code * scale + minimum, with scales and minimums [r, blocks, groups]; minimums None where the format has
    none. Codes are int8: `bits` 8, or 4: 0..15 with minimums or a `table` (value = table[code] * scale), -8..7
    without. `wide`: scales and minimums are float32. `native`: the native extension packs the bytes themselves.
    """

    split: Callable[[Host], tuple[Host, Host, Host | None]]
    bits: int
    group: int
    mins: bool = False
    wide: bool = False
    table: tuple[int, ...] = ()
    super: SuperBlock | None = None
    native: bool = True

    @property
    def loaded_bits(self) -> float:
        """Bits a number takes once loaded: its code and its part of what the group has."""
        if self.super is not None:
            floats = 16 * (1 + self.mins) / SUPER
            return self.super.bits + self.super.multiples / self.group + floats
        return self.bits + (32 if self.wide else 16) * (1 + self.mins) / self.group


def half(raw: Host, at: int) -> Host:
    """The float16 at byte `at` of every block, [r, blocks, 1]."""
    return np.ascontiguousarray(raw[..., at : at + 2]).view(np.float16)


def single(raw: Host, at: int) -> Host:
    """Work as `half`, in float32."""
    return half(raw, at).astype(np.float32)


def flat(parts: Host) -> Host:
    """[r, blocks, numbers] of [r, blocks, ...]."""
    return parts.reshape(*parts.shape[:2], -1)


def _nibbles(qs: Host) -> Host:
    """Low halves of the bytes, then high halves, along the last axis: uint8 [..., 2 * bytes]."""
    return np.concatenate((qs & 15, qs >> 4), -1)


def _pairs(qs: Host, run: int) -> Host:
    """`_nibbles` of every `run` bytes, one after the other."""
    return flat(_nibbles(qs.reshape(*qs.shape[:-1], -1, run)))


def _fifth(qh: Host) -> Host:
    """Bit i of 4 little-endian bytes as 16 at place i: uint8 [..., 32]."""
    shifts = np.arange(8, dtype=np.uint8)
    return flat((qh[..., None] >> shifts & 1) << 4)


def _int8(codes: Host, less: int) -> Host:
    """uint8 codes as int8, `less` less."""
    return codes.view(np.int8) - np.int8(less)


def _q4_0(raw: Host) -> tuple[Host, Host, None]:
    return _int8(_nibbles(raw[..., 2:18]), 8), half(raw, 0), None


def _q4_1(raw: Host) -> tuple[Host, Host, Host]:
    return _int8(_nibbles(raw[..., 4:20]), 0), half(raw, 0), half(raw, 2)


def _q5_0(raw: Host) -> tuple[Host, Host, None]:
    return _int8(_nibbles(raw[..., 6:22]) | _fifth(raw[..., 2:6]), 16), half(raw, 0), None


def _q5_1(raw: Host) -> tuple[Host, Host, Host]:
    return _int8(_nibbles(raw[..., 8:24]) | _fifth(raw[..., 4:8]), 0), half(raw, 0), half(raw, 2)


def _q8_0(raw: Host) -> tuple[Host, Host, None]:
    return raw[..., 2:34].view(np.int8), half(raw, 0), None


def _crumbs(qs: Host) -> Host:
    """64 bytes of four 2-bit codes: of each 32 bytes all lowest pairs of bits, then all next: uint8 [..., 256]."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return flat(qs.reshape(*qs.shape[:-1], 2, 1, 32) >> shifts & 3)


def _q2_k(raw: Host) -> tuple[Host, Host, Host]:
    d, least = single(raw, 80), single(raw, 82)
    sub = raw[..., :16]
    return _int8(_crumbs(raw[..., 16:80]), 0), d * (sub & 15), -(least * (sub >> 4))


def _q3_k(raw: Host) -> tuple[Host, Host, None]:
    bits = np.arange(8, dtype=np.uint8)[:, None]
    high = flat(raw[..., None, :32] >> bits & 1)
    low = raw[..., 96:104]
    top = raw[..., None, 104:108] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    sub = _nibbles(low) | (flat(top) << 4)
    return _int8(_crumbs(raw[..., 32:96]) | high << 2, 4), single(raw, 108) * (sub.view(np.int8) - np.float32(32)), None


def _six_bits(packed: Host) -> tuple[Host, Host]:
    """Eight scales and eight minimums of 6 bits from 12 bytes, as floats."""
    a, b, c = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate((a & 63, c & 15 | a >> 6 << 4), -1)
    return scales.astype(np.float32), np.concatenate((b & 63, c >> 4 | b >> 6 << 4), -1).astype(np.float32)


def _q4_k(raw: Host) -> tuple[Host, Host, Host]:
    scales, mins = _six_bits(raw[..., 4:16])
    return _int8(_pairs(raw[..., 16:], 32), 0), single(raw, 0) * scales, -(single(raw, 2) * mins)


def _q5_k(raw: Host) -> tuple[Host, Host, Host]:
    scales, mins = _six_bits(raw[..., 4:16])
    bits = np.arange(8, dtype=np.uint8)[:, None]
    high = flat((raw[..., None, 16:48] >> bits & 1) << 4)
    codes = _int8(_pairs(raw[..., 48:], 32) | high, 0)
    return codes, single(raw, 0) * scales, -(single(raw, 2) * mins)


def _q6_k(raw: Host) -> tuple[Host, Host, None]:
    low = _pairs(raw[..., :128], 64)
    high = _crumbs(raw[..., 128:192])
    sub = raw[..., 192:208].view(np.int8).astype(np.float32)
    return _int8(low | high << 4, 32), single(raw, 208) * sub, None


def _iq4_nl(raw: Host) -> tuple[Host, Host, None]:
    return _int8(_nibbles(raw[..., 2:18]), 0), half(raw, 0), None


def _iq4_xs(raw: Host) -> tuple[Host, Host, None]:
    pairs = np.arange(0, 8, 2, dtype=np.uint8)
    high = flat(raw[..., 2:4, None] >> pairs & 3)
    low = flat(np.stack((raw[..., 4:8] & 15, raw[..., 4:8] >> 4), -1))
    sub = (low | high << 4).astype(np.float32) - 32
    return _int8(_pairs(raw[..., 8:], 16), 0), single(raw, 0) * sub, None


def _mxfp4(raw: Host) -> tuple[Host, Host, None]:
    return _int8(_nibbles(raw[..., 1:]), 0), np.ldexp(np.float32(1), raw[..., :1].astype(np.int32) - 128), None


def _nvfp4(raw: Host) -> tuple[Host, Host, None]:
    """Four groups of 16 and their scales, floats of 4 bits of exponent and 3 of mantissa; 127 and 0 are no number."""
    exponent, mantissa = raw[..., :4].astype(np.int32) >> 3 & 15, (raw[..., :4] & 7).astype(np.float32)
    scale = np.ldexp(mantissa + 8 * (exponent > 0), np.maximum(exponent, 1) - 11)
    scale[raw[..., :4] == 127] = 0
    return _int8(_pairs(raw[..., 4:], 8), 0), scale.astype(np.float16), None


def _q8_1(raw: Host) -> tuple[Host, Host, None]:
    return raw[..., 4:36].view(np.int8), half(raw, 0), None


def _q8_k(raw: Host) -> tuple[Host, Host, None]:
    scale = np.ascontiguousarray(raw[..., :4]).view(np.float32)
    return raw[..., 4:260].view(np.int8), scale.repeat(2, -1), None


FORMS = {
    "Q4_0": Form(_q4_0, 4, 32),
    "Q4_1": Form(_q4_1, 4, 32, mins=True),
    "Q5_0": Form(_q5_0, 8, 32),
    "Q5_1": Form(_q5_1, 8, 32, mins=True),
    "Q8_0": Form(_q8_0, 8, 32),
    "Q2_K": Form(_q2_k, 4, 16, mins=True, wide=True, super=SuperBlock(2, 8, 80, 82)),
    "Q3_K": Form(_q3_k, 4, 16, wide=True, super=SuperBlock(3, 8, 108)),
    "Q4_K": Form(_q4_k, 4, 32, mins=True, wide=True, super=SuperBlock(4, 16, 0, 2)),
    "Q5_K": Form(_q5_k, 8, 32, mins=True, wide=True, super=SuperBlock(5, 16, 0, 2)),
    "Q6_K": Form(_q6_k, 8, 16, wide=True, super=SuperBlock(6, 8, 208)),
    "IQ4_NL": Form(_iq4_nl, 4, 32, table=IQ4_TABLE),
    "IQ4_XS": Form(_iq4_xs, 4, 32, wide=True, table=IQ4_TABLE, super=SuperBlock(4, 8, 0)),
    "MXFP4": Form(_mxfp4, 4, 32, wide=True, table=MXFP4.digits),
    "NVFP4": Form(_nvfp4, 4, 16, table=MXFP4.digits, native=False),
    "Q8_1": Form(_q8_1, 8, 32, native=False),
    "Q8_K": Form(_q8_k, 8, 128, wide=True, native=False),
}
"""Block type -> how it is taken apart."""
