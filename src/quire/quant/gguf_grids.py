"""ggml's formats of one to three bits taken apart: IQ1 to IQ3, whose codes name runs of numbers, and TQ (-1, 0, 1).

The layouts are those of ggml-common.h and ggml-quants.c. Nothing is rounded. Numbers of a run have at most sixteen
values, signs included, so they become codes of 4 bits into a table (`table4`), whose scales are the file's times a
power of two, in float32: 5 to 6 bits a number. The scales of IQ3_S are multiples of a float16 as those of IQ4_XS, and
TQ's numbers are codes 0 to 2 over a minimum as those of Q2_K: these take the super-blocks of both, 4.3 and 2.6 bits.
Q1_0 (-1, 1) and Q2_0 (-1 to 2) have no super-blocks, so their codes take 4 bits.
"""

from __future__ import annotations

import base64
from functools import cache

import numpy as np

from quire.ops.arrays import Host
from quire.quant.gguf_decode import Form, SuperBlock, flat, half, single
from quire.quant.iq_grids import WORDS

NEGATIVE = {2: 4, 3: 8}
"""What a sign adds to the code of a magnitude, by the digit in the format's name."""
IQ1_TABLE = (-9, -1, 7, 0, -7, 1, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0)
"""Eighths: -1, 0 or 1, less an eighth and, from place 4 on, more an eighth."""
IQ2_TABLE = (8, 25, 43, 0, -8, -25, -43, 0, 0, 0, 0, 0, 0, 0, 0, 0)
IQ3_XXS_TABLE = (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62)
IQ3_S_TABLE = (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)


@cache
def _grid(name: str) -> Host:
    """The runs of a format, uint8 [runs, numbers of a run]."""
    words = _words(np.frombuffer(base64.b85decode(WORDS[name]), np.uint8))
    bits = 4 if name.startswith("IQ3") else 2
    return _bits(words, *range(0, 16, bits), mask=(1 << bits) - 1).astype(np.uint8)


def _bits(data: Host, *shifts: int, mask: int = 1) -> Host:
    """`mask` of every number of `data` [...] int32 or uint8 shifted down: int32 [..., len(shifts)]."""
    return data.astype(np.int32)[..., None] >> np.array(shifts, np.int32) & mask


def _words(data: Host) -> Host:
    """Little-endian words of 16 bits, int32, of bytes [..., 2 * words]."""
    pairs = data.reshape(*data.shape[:-1], -1, 2).astype(np.int32)
    return pairs[..., 0] | pairs[..., 1] << 8


def _signed(name: str, runs: Host, signs: Host) -> Host:
    """Codes int8 [r, blocks, 256] of runs (int32 [r, blocks, count]) and their signs, a bit each [r, blocks, 256]."""
    codes = flat(_grid(name)[runs])
    return (codes + (signs * NEGATIVE[int(name[2])]).astype(np.uint8)).view(np.int8)


def _sevens(signs: Host) -> Host:
    """Eight signs of every seven, the last of which makes their number even: int32 [..., 8]."""
    seven = _bits(signs, *range(7))
    return np.concatenate((seven, seven.sum(-1, keepdims=True, dtype=np.int32) & 1), -1)


def _eight(raw: Host) -> Host:
    return flat(_bits(raw, *range(8)))


def _odd_eighths(unit: Host, sub: Host) -> Host:
    """unit * (2 sub + 1) / 8, exact in float32."""
    return unit.astype(np.float32) * ((2 * sub + 1).astype(np.float32) / 8)


def _iq2_xxs(raw: Host) -> tuple[Host, Host, None]:
    pieces = raw[..., 2:].reshape(*raw.shape[:-1], 8, 8)
    high = _words(pieces[..., 4:])
    low, top = high[..., 0], high[..., 1]
    four = np.stack((low, low >> 7 | top << 9, low >> 14 | top << 2, top >> 5), -1) & 127
    codes = _signed("IQ2_XXS", flat(pieces[..., :4]).astype(np.int32), flat(_sevens(four)))
    return codes, _odd_eighths(half(raw, 0), top >> 12), None


def _iq2_xs(raw: Host) -> tuple[Host, Host, None]:
    words = _words(raw[..., 2:66])
    codes = _signed("IQ2_XS", words & 511, flat(_sevens(words >> 9)))
    return codes, _odd_eighths(half(raw, 0), flat(_bits(raw[..., 66:], 0, 4, mask=15))), None


def _iq2_s(raw: Host) -> tuple[Host, Host, None]:
    runs = raw[..., 2:34].astype(np.int32) | flat(_bits(raw[..., 66:74], 0, 2, 4, 6, mask=3)) << 8
    codes = _signed("IQ2_S", runs, _eight(raw[..., 34:66]))
    return codes, _odd_eighths(half(raw, 0), flat(_bits(raw[..., 74:], 0, 4, mask=15))), None


def _iq3_xxs(raw: Host) -> tuple[Host, Host, None]:
    high = _words(raw[..., 66:].reshape(*raw.shape[:-1], 8, 4))
    low, top = high[..., 0], high[..., 1]
    four = np.stack((low, low >> 7 | top << 9, low >> 14 | top << 2, top >> 5), -1) & 127
    codes = _signed("IQ3_XXS", raw[..., 2:66].astype(np.int32), flat(_sevens(four)))
    return codes, 2 * _odd_eighths(half(raw, 0), top >> 12), None


def _iq3_s(raw: Host) -> tuple[Host, Host, None]:
    codes = _signed("IQ3_S", raw[..., 2:66].astype(np.int32) | _eight(raw[..., 66:74]) << 8, _eight(raw[..., 74:106]))
    sub = flat(_bits(raw[..., 106:], 0, 4, mask=15))
    return codes, single(raw, 0) * (2 * sub + 1).astype(np.float32), None


def _moved(runs: Host, less: Host) -> Host:
    """Codes of IQ1 of runs, and whether an eighth is taken away from each, int32 [r, blocks, 32] both."""
    return flat(_grid("IQ1")[runs] + (4 - 4 * less).astype(np.uint8)[..., None]).view(np.int8)


def _iq1_s(raw: Host) -> tuple[Host, Host, None]:
    qh = _words(raw[..., 34:])
    runs = raw[..., 2:34].astype(np.int32) | flat(_bits(qh, 0, 3, 6, 9, mask=7)) << 8
    codes = _moved(runs, (qh >> 15).repeat(4, -1))
    return codes, _odd_eighths(half(raw, 0), qh >> 12 & 7), None


def _iq1_m(raw: Host) -> tuple[Host, Host, None]:
    qh, scales = flat(_bits(raw[..., 32:48], 0, 4, mask=15)), _words(raw[..., 48:])
    top = (scales >> 12 << np.array((0, 4, 8, 12), np.int32)).sum(-1, keepdims=True, dtype=np.int32)
    unit = np.where(top > 32767, top - 65536, top).astype(np.int16).view(np.float16)
    codes = _moved(raw[..., :32].astype(np.int32) | (qh & 7) << 8, qh >> 3)
    return codes, _odd_eighths(unit, flat(_bits(scales, 0, 3, 6, 9, mask=7))), None


def _thirds(data: Host, powers: int) -> Host:
    """Digits of base 3, 0 to 2, of bytes uint8 [..., c] that hold `powers` of them as a fraction: [..., powers * c]."""
    places = np.array([3**i for i in range(powers)], np.int32)[:, None]
    return flat((data.astype(np.int32)[..., None, :] * places & 255) * 3 >> 8)


def _three(codes: Host, unit: Host) -> tuple[Host, Host, Host]:
    """-1, 0 and 1 as codes 0 to 2 above a minimum, in groups of 16 as Q2_K's."""
    scales = np.broadcast_to(unit.astype(np.float32), (*unit.shape[:-1], 16))
    return codes.astype(np.int8), scales, -scales


def _tq1_0(raw: Host) -> tuple[Host, Host, Host]:
    codes = (_thirds(raw[..., :32], 5), _thirds(raw[..., 32:48], 5), _thirds(raw[..., 48:52], 4))
    return _three(np.concatenate(codes, -1), half(raw, 52))


def _tq2_0(raw: Host) -> tuple[Host, Host, Host]:
    data = raw[..., :64].reshape(*raw.shape[:-1], 2, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return _three(flat(data[..., None, :] >> shifts & 3), half(raw, 64))


def _q1_0(raw: Host) -> tuple[Host, Host, None]:
    return 2 * _eight(raw[..., 2:]).astype(np.int8) - np.int8(1), half(raw, 0), None


def _q2_0(raw: Host) -> tuple[Host, Host, None]:
    return flat(_bits(raw[..., 2:], 0, 2, 4, 6, mask=3)).astype(np.int8) - np.int8(1), half(raw, 0), None


GRID_FORMS = {
    "IQ1_S": Form(_iq1_s, 4, 32, wide=True, table=IQ1_TABLE, native=False),
    "IQ1_M": Form(_iq1_m, 4, 16, wide=True, table=IQ1_TABLE, native=False),
    "IQ2_XXS": Form(_iq2_xxs, 4, 32, wide=True, table=IQ2_TABLE, native=False),
    "IQ2_XS": Form(_iq2_xs, 4, 16, wide=True, table=IQ2_TABLE, native=False),
    "IQ2_S": Form(_iq2_s, 4, 16, wide=True, table=IQ2_TABLE, native=False),
    "IQ3_XXS": Form(_iq3_xxs, 4, 32, wide=True, table=IQ3_XXS_TABLE, native=False),
    "IQ3_S": Form(_iq3_s, 4, 32, wide=True, table=IQ3_S_TABLE, super=SuperBlock(4, 8, 0), native=False),
    "TQ1_0": Form(_tq1_0, 4, 16, mins=True, wide=True, super=SuperBlock(2, 8, 52, 52), native=False),
    "TQ2_0": Form(_tq2_0, 4, 16, mins=True, wide=True, super=SuperBlock(2, 8, 64, 64), native=False),
    "Q1_0": Form(_q1_0, 4, 128, native=False),
    "Q2_0": Form(_q2_0, 4, 64, native=False),
}
"""Block type -> how it is taken apart."""
