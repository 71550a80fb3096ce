"""4-bit code books: sixteen numbers, of which every weight is one, times a scale per group of columns.

NF4 (Dettmers et al. 2023, QLoRA): quantiles of a normal distribution, in [-1, 1]. FP4 of bitsandbytes: sign, 2 bits of
exponent, 1 of mantissa, in [-1, 1]. MXFP4 (Open Compute Project, Microscaling Formats 1.0): e2m1 with a power of two
per 32 columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from quire.core.dtypes import F32, Dtype
from quire.core.errors import ConfigError, ModelError
from quire.ops.arrays import Host, as_f32
from quire.ops.weights import Weight
from quire.quant.base import QWeight
from quire.quant.packed import fewest_bytes
from quire.quant.parallel_rows import inverse, over_rows
from quire.quant.rtn import INT8, RoundToNearest


@dataclass(frozen=True)
class CodeBook:
    """The numbers of codes are `digits` / `unit`; kernels multiply the digits. `powers`: scales are powers of two."""

    name: str
    digits: tuple[int, ...]
    unit: int
    powers: bool = False

    @property
    def table(self) -> Host:
        """The integers [16] int16."""
        return np.array(self.digits, np.int16)

    @property
    def head(self) -> RoundToNearest:
        """The output head keeps 8 bits, as it does beside int4."""
        return INT8

    def weight(self, codes: Host, scales: Host, group: int, activation_bits: int = 16) -> QWeight:
        """numbers[codes] * scales: codes [n, k] int8 0..15, scales [n, k / group] f32."""
        if not np.isfinite(scales).all():
            raise ModelError("a scale is nan or inf; the file is damaged")
        scales = fewest_bytes(scales.astype(np.float32) / self.unit)
        return QWeight(Weight("table4", codes, scales, group=group, table=self.table, activation_bits=activation_bits))

    def check(self, what: str, columns: int, group: int) -> None:
        """Rows must be a whole number of groups, as for integers."""
        INT8.check(what, columns, group)

    def at_pack(self, w: Host, group: int) -> QWeight:
        """Quantize a matrix when it is packed."""
        return self.quantize(w, group)

    def quantize(self, w: Host, group: int) -> QWeight:
        """w [n, k] to the nearest number of the book, scaled by the largest magnitude of each group of columns."""
        n, k = w.shape
        if k % group:
            raise ConfigError(f"{k} columns are not a multiple of --group-size {group}", param="group_size")
        borders, places = self.borders(F32)
        codes, scales = np.empty((n, k), np.int8), np.empty((n, k // group), np.float32)

        def work(rows: slice) -> None:
            groups = as_f32(w[rows]).reshape(-1, k // group, group)
            scale = self.scale(np.abs(groups).max(-1))
            scaled = groups * inverse(scale)[..., None]
            codes[rows] = places[np.searchsorted(borders, scaled)].reshape(-1, k)
            scales[rows] = scale

        over_rows(n, k, work)
        if not np.isfinite(scales).all():
            raise ModelError("a weight holds nan or inf and cannot be quantized")
        return self.weight(codes, scales, group, activation_bits=8)

    def scale(self, top: Host) -> Host:
        """The scale of groups whose largest magnitudes are `top` (any shape, f32 or f64), which is not finite where
        they are not: `top` itself, or 2^floor(log2(top)) over that of the book's largest number, at least 2^-127."""
        if not self.powers:
            return top
        # log2 in f32 rounds the number just below a power of two up to it; frexp is exact.
        room = math.frexp(max(self.digits) / self.unit)[1]
        power = np.ldexp(np.ones_like(top), np.maximum(np.frexp(top)[1] - room, -127))
        return np.where((top > 0) & np.isfinite(top), power, top)

    def borders(self, dtype: Dtype) -> tuple[Host, Host]:
        """Between the numbers, ascending [numbers - 1] in `dtype`, and the codes of these [numbers] int8.

        What is on a border has the code below it, so one whose upper code is even lies just before the middle where
        scales are powers of two: ties go to even codes there (Microscaling Formats 1.0).
        """
        first = {value: code for code, value in reversed(list(enumerate(self.digits)))}
        codes = sorted(first.values(), key=self.digits.__getitem__)
        values = np.array([self.digits[code] for code in codes], dtype) / self.unit
        borders = (values[1:] + values[:-1]) / 2
        if self.powers:
            upper_even = np.array([code % 2 == 0 for code in codes[1:]])
            borders = np.where(upper_even, np.nextafter(borders, -np.inf), borders)
        return borders, np.array(codes, np.int8)


NF4_NUMBERS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
NF4_UNIT = 127 * 256
"""A number of two digits of base 255 is within 2e-5 of that of the book, relative to the largest."""
NF4 = CodeBook("nf4", tuple(round(x * NF4_UNIT) for x in NF4_NUMBERS), NF4_UNIT)
FP4 = CodeBook("fp4", (0, 1, 128, 192, 64, 96, 32, 48, 0, -1, -128, -192, -64, -96, -32, -48), 192)
"""bitsandbytes' numbers are multiples of 1 / 192."""
MXFP4 = CodeBook("mxfp4", (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), 2, powers=True)
