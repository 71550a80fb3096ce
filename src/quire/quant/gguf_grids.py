"""ggml's formats of one to three bits taken apart: IQ1 to IQ3, whose codes name runs of numbers, and TQ (-1, 0, 1).

The layouts are those of ggml-common.h and ggml-quants.c. Nothing is rounded. Numbers of a run have at most sixteen
values, signs included, so they become codes of 4 bits into a table (`table4`), whose scales are the file's times a
power of two, in float32: 5 to 6 bits a number. The scales of IQ3_S are multiples of a float16 as those of IQ4_XS, and
TQ's numbers are codes 0 to 2 over a minimum as those of Q2_K: these take the super-blocks of both, 4.3 and 2.6 bits.
"""

from __future__ import annotations

import base64
from functools import cache
from typing import TYPE_CHECKING

from quire.ops.lazy import torch
from quire.quant.gguf_blocks import Form, SuperBlock, half
from quire.quant.grids import WORDS

if TYPE_CHECKING:
    from torch import Tensor

NEGATIVE = {2: 4, 3: 8}
"""What a sign adds to the code of a magnitude, by the digit in the format's name."""
IQ1_TABLE = (-9, -1, 7, 0, -7, 1, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0)
"""Eighths: -1, 0 or 1, less an eighth and, from place 4 on, more an eighth."""
IQ2_TABLE = (8, 25, 43, 0, -8, -25, -43, 0, 0, 0, 0, 0, 0, 0, 0, 0)
IQ3_XXS_TABLE = (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62)
IQ3_S_TABLE = (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)


@cache
def _grid(name: str) -> Tensor:
    """The runs of a format, uint8 [runs, numbers of a run]."""
    words = _words(torch.frombuffer(bytearray(base64.b85decode(WORDS[name])), dtype=torch.uint8))
    bits = 4 if name.startswith("IQ3") else 2
    return _bits(words, *range(0, 16, bits), mask=(1 << bits) - 1).to(torch.uint8)


def _bits(data: Tensor, *shifts: int, mask: int = 1) -> Tensor:
    """`mask` of every number of `data` [...] int32 or uint8 shifted down: int32 [..., len(shifts)]."""
    return data.int()[..., None] >> torch.tensor(shifts, dtype=torch.int32) & mask


def _words(data: Tensor) -> Tensor:
    """Little-endian words of 16 bits, int32, of bytes [..., 2 * words]."""
    pairs = data.reshape(*data.shape[:-1], -1, 2).int()
    return pairs[..., 0] | pairs[..., 1] << 8


def _signed(name: str, runs: Tensor, signs: Tensor) -> Tensor:
    """Codes int8 [r, blocks, 256] of runs (int32 [r, blocks, count]) and their signs, a bit each [r, blocks, 256]."""
    codes = _grid(name)[runs.long()].flatten(-2)
    return (codes + (signs * NEGATIVE[int(name[2])]).to(torch.uint8)).view(torch.int8)


def _sevens(signs: Tensor) -> Tensor:
    """Eight signs of every seven, the last of which makes their number even: int32 [..., 8]."""
    seven = _bits(signs, *range(7))
    return torch.cat((seven, seven.sum(-1, keepdim=True, dtype=torch.int32) & 1), -1)


def _eight(raw: Tensor) -> Tensor:
    return _bits(raw, *range(8)).flatten(-2)


def _odd_eighths(unit: Tensor, sub: Tensor) -> Tensor:
    """unit * (2 sub + 1) / 8, exact in float32."""
    return unit.float() * ((2 * sub + 1).float() / 8)


def _iq2_xxs(raw: Tensor) -> tuple[Tensor, Tensor, None]:
    pieces = raw[..., 2:].reshape(*raw.shape[:-1], 8, 8)
    high = _words(pieces[..., 4:])
    low, top = high[..., 0], high[..., 1]
    four = torch.stack((low, low >> 7 | top << 9, low >> 14 | top << 2, top >> 5), -1) & 127
    codes = _signed("IQ2_XXS", pieces[..., :4].flatten(-2).int(), _sevens(four).flatten(-3))
    return codes, _odd_eighths(half(raw, 0), top >> 12), None


def _iq2_xs(raw: Tensor) -> tuple[Tensor, Tensor, None]:
    words = _words(raw[..., 2:66])
    codes = _signed("IQ2_XS", words & 511, _sevens(words >> 9).flatten(-2))
    return codes, _odd_eighths(half(raw, 0), _bits(raw[..., 66:], 0, 4, mask=15).flatten(-2)), None


def _iq2_s(raw: Tensor) -> tuple[Tensor, Tensor, None]:
    runs = raw[..., 2:34].int() | _bits(raw[..., 66:74], 0, 2, 4, 6, mask=3).flatten(-2) << 8
    codes = _signed("IQ2_S", runs, _eight(raw[..., 34:66]))
    return codes, _odd_eighths(half(raw, 0), _bits(raw[..., 74:], 0, 4, mask=15).flatten(-2)), None


def _iq3_xxs(raw: Tensor) -> tuple[Tensor, Tensor, None]:
    high = _words(raw[..., 66:].reshape(*raw.shape[:-1], 8, 4))
    low, top = high[..., 0], high[..., 1]
    four = torch.stack((low, low >> 7 | top << 9, low >> 14 | top << 2, top >> 5), -1) & 127
    codes = _signed("IQ3_XXS", raw[..., 2:66].int(), _sevens(four).flatten(-3))
    return codes, 2 * _odd_eighths(half(raw, 0), top >> 12), None


def _iq3_s(raw: Tensor) -> tuple[Tensor, Tensor, None]:
    codes = _signed("IQ3_S", raw[..., 2:66].int() | _eight(raw[..., 66:74]) << 8, _eight(raw[..., 74:106]))
    sub = _bits(raw[..., 106:], 0, 4, mask=15).flatten(-2)
    return codes, half(raw, 0).float() * (2 * sub + 1).float(), None


def _moved(runs: Tensor, less: Tensor) -> Tensor:
    """Codes of IQ1 of runs, and whether an eighth is taken away from each, int32 [r, blocks, 32] both."""
    return (_grid("IQ1")[runs.long()] + (4 - 4 * less).to(torch.uint8)[..., None]).flatten(-2).view(torch.int8)


def _iq1_s(raw: Tensor) -> tuple[Tensor, Tensor, None]:
    qh = _words(raw[..., 34:])
    runs = raw[..., 2:34].int() | _bits(qh, 0, 3, 6, 9, mask=7).flatten(-2) << 8
    codes = _moved(runs, (qh >> 15).repeat_interleave(4, -1))
    return codes, _odd_eighths(half(raw, 0), qh >> 12 & 7), None


def _iq1_m(raw: Tensor) -> tuple[Tensor, Tensor, None]:
    qh, scales = _bits(raw[..., 32:48], 0, 4, mask=15).flatten(-2), _words(raw[..., 48:])
    top = (scales >> 12 << torch.tensor((0, 4, 8, 12), dtype=torch.int32)).sum(-1, keepdim=True, dtype=torch.int32)
    unit = torch.where(top > 32767, top - 65536, top).to(torch.int16).view(torch.float16)
    codes = _moved(raw[..., :32].int() | (qh & 7) << 8, qh >> 3)
    return codes, _odd_eighths(unit, _bits(scales, 0, 3, 6, 9, mask=7).flatten(-2)), None


def _thirds(data: Tensor, powers: int) -> Tensor:
    """Digits of base 3, 0 to 2, of bytes uint8 [..., c] that hold `powers` of them as a fraction: [..., powers * c]."""
    places = torch.tensor([3**i for i in range(powers)], dtype=torch.int32)[:, None]
    return ((data.int()[..., None, :] * places & 255) * 3 >> 8).flatten(-2)


def _three(codes: Tensor, unit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-1, 0 and 1 as codes 0 to 2 above a minimum, in groups of 16 as Q2_K's."""
    scales = unit.float().expand(*unit.shape[:-1], 16)
    return codes.to(torch.int8), scales, -scales


def _tq1_0(raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes = (_thirds(raw[..., :32], 5), _thirds(raw[..., 32:48], 5), _thirds(raw[..., 48:52], 4))
    return _three(torch.cat(codes, -1), half(raw, 52))


def _tq2_0(raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    data = raw[..., :64].reshape(*raw.shape[:-1], 2, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return _three((data[..., None, :] >> shifts & 3).flatten(-3), half(raw, 64))


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
}
"""Block type -> how it is taken apart."""
