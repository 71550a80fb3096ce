"""Round-to-nearest quantization at load: symmetric integers with one float16 scale per group of columns.

int8: codes -127..127, scale = max|w| / 127.
int4: codes -8..7, scale = m / -8, m / -8.5 or m / -9 with m the number of largest magnitude, sign kept, so that m takes
the code that has no opposite (as in llama.cpp's Q4_0); the one with the smallest squared error wins. Relative error on
normal numbers, groups of 32 / 64 / 128: 0.083 / 0.091 / 0.098, against 0.086 / 0.095 / 0.103 for m / -8 alone and
0.097 / 0.108 / 0.117 for max|w| / 7. int8: 0.0054 / 0.0059 / 0.0065.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.core.dtypes import BF16, F32
from quire.core.errors import ConfigError, ModelError
from quire.ops.arrays import Host, address, as_f32
from quire.ops.descriptors import RoundingDescriptor
from quire.ops.native import best_ops, require_native
from quire.ops.weights import CANNOT_ROUND, RoundForm, RowSelection, StoredMatrix, Weight
from quire.quant.base import QWeight
from quire.quant.parallel_rows import in_dtype, over_rows
from quire.quant.stored import StoredWeight


@dataclass(frozen=True)
class RoundToNearest:
    """Symmetric per-group rounding to codes low..high; a group's extreme by each of `divisors` is a scale to try."""

    name: str
    bits: int
    low: int
    high: int
    divisors: tuple[float, ...]
    head_scheme: RoundToNearest | None = None

    @property
    def head(self) -> RoundToNearest:
        """The format of the output head."""
        return self.head_scheme or self

    def check(self, what: str, columns: int, group: int) -> None:
        """Rows must be a whole number of groups: the kernels read whole groups."""
        if columns % group:
            fitting = [str(g) for g in (32, 64, 128) if columns % g == 0]
            way_out = (
                f"use --group-size {' or '.join(fitting)}" if fitting else "no group size fits; serve it unquantized"
            )
            raise ConfigError(
                f"--quantization {self.name}: the {columns} columns of {what} are not a multiple of "
                f"--group-size {group}; {way_out}",
                param="group_size",
            )

    def quantize(self, w: Host, group: int) -> QWeight:
        """w [n, k] to codes [n, k] int8 and scales [n, k / group] float16; `ModelError` when w has nan or inf."""
        n, k = w.shape
        self.check("the matrix", k, group)
        codes, scales = np.empty((n, k), np.int8), np.empty((n, k // group), np.float16)
        finite = self._native(w, group, codes, scales) if best_ops() else self._reference(w, group, codes, scales)
        if not finite:
            raise ModelError(CANNOT_ROUND)
        return QWeight(Weight(self.name, codes, scales, group=group))

    def at_pack(self, w: Host, group: int) -> QWeight:
        """Quantize a matrix once it is packed: the native extension rounds and packs in one pass."""
        self.check("the matrix", w.shape[1], group)
        w = _readable(w)
        form = RoundForm(self.name, self.bits, group, self.low, self.high, self.divisors)
        label = f"{self.name} g{group}"
        return StoredWeight(
            StoredMatrix(form, (RowSelection(w),), w.shape[1], group), label, lambda w: self.quantize(w, group).weight
        )

    def _native(self, w: Host, group: int, codes: Host, scales: Host) -> bool:
        """Work as `_reference`, in the native extension: equal to the bit, 20 times faster."""
        w = np.ascontiguousarray(_readable(w))
        divisors, bad = np.array(self.divisors, np.float32), np.zeros(1, np.int64)
        rounding = RoundingDescriptor(
            divisors=address(divisors), tries=len(divisors), k=w.shape[1], stride=w.strides[0], group=group,
            low=self.low, high=self.high, bits=self.bits, bf16=int(w.dtype == BF16),
        )  # fmt: skip
        require_native().call(best_ops()["round_groups"], (codes, scales, bad, w, rounding, len(w)))
        return not bad[0]

    def _reference(self, w: Host, group: int, codes: Host, scales: Host) -> bool:
        """Fill codes and scales; False when a scale is not finite."""

        def work(rows: slice) -> None:
            c, s = self._round(as_f32(w[rows]).reshape(-1, w.shape[1] // group, group))
            codes[rows], scales[rows] = c.reshape(-1, w.shape[1]), s

        over_rows(w.shape[0], w.shape[1], work)
        return bool(np.isfinite(scales).all())

    def _round(self, groups: Host) -> tuple[Host, Host]:
        """Codes and scales of groups [n, g, group] f32; scales are rounded to float16 before codes are derived."""
        top = np.take_along_axis(groups, np.abs(groups).argmax(-1, keepdims=True), -1)[..., 0]
        first, *others = self.divisors
        codes, scale, error = _at_scale(groups, top / first, self.low, self.high)
        for divisor in others:
            c, s, e = _at_scale(groups, top / divisor, self.low, self.high)
            better = e < error
            codes = np.where(better[..., None], c, codes)
            scale, error = np.where(better, s, scale), np.minimum(e, error)
        return codes, scale


def _at_scale(groups: Host, scale: Host, low: int, high: int) -> tuple[Host, Host, Host]:
    """(codes as f32, scale as f16, squared error) of rounding groups [n, g, group] at scale [n, g]."""
    half = scale.astype(np.float16)
    used = half.astype(np.float32)[..., None]
    inverse = np.where(used == 0, np.float32(0), 1 / used)
    codes = np.rint(groups * inverse).clip(low, high)
    return codes, half, _sum(np.square(codes * used - groups))


def _sum(values: Host) -> Host:
    """Sum over the last axis in the order of the native kernel: 16 lanes, then by halves."""
    lanes = values.reshape(*values.shape[:-1], -1, 16)
    total = lanes[..., 0, :]
    for place in range(1, lanes.shape[-2]):
        total = total + lanes[..., place, :]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


def _readable(w: Host) -> Host:
    """Make an array as native code reads it: bf16 or f32."""
    return w if w.dtype == BF16 else in_dtype(w, F32)


INT8 = RoundToNearest("int8", 8, -127, 127, divisors=(127.0,))
# The head stays at 8 bits under int4: on the embedded model, with the rest in int4, the KL divergence from float32 is
# 0.084 nats with a 4-bit head and 0.058 with an 8-bit one (tests/quant/test_quant.py). Q4_0 files of llama.cpp keep
# 6 bits.
INT4 = RoundToNearest("int4", 4, -8, 7, divisors=(-8.0, -8.5, -9.0), head_scheme=INT8)
