"""Sparse matrices of compressed-tensors files: the numbers that are kept, and a bit for every place that has one.

`bitmask` uint8 [n, k / 8], the first column in the lowest bit; `shape` int64 [2, 1] or [2]; `compressed`: for 2:4
(two of any four neighbours, "sparse-24-bitmask") [n, k / 2], for any pattern ("sparse-bitmask") the numbers row after
row, with the start of each row in `row_offsets` int64 [n]. The numbers may be quantized, with scales beside them.

They are expanded on load and multiplied with their zeros: nothing is gained in speed or memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from quire.core.dtypes import U8, Dtype
from quire.core.errors import ModelError
from quire.ops.arrays import Host
from quire.quant.base import QuantScheme, QWeight
from quire.quant.packed import expect

FORMATS = {"sparse-24-bitmask": True, "sparse-bitmask": False}
"""`sparsity_config.format` -> whether it is 2:4."""
NOTE = "sparse weights are expanded and run dense, zeros included"


@dataclass(frozen=True)
class Sparse:
    """What `inner` would find in `weight` is in `compressed` and `bitmask`. `halves`: 2:4."""

    inner: QuantScheme
    halves: bool

    @property
    def name(self) -> str:
        """ "2:4 fp8"."""
        return f"{'2:4' if self.halves else 'sparse'} {self.inner.name}"

    @property
    def parts(self) -> Mapping[str, bool]:
        """Parts of `inner`, with three or four instead of the matrix."""
        numbers = {"compressed": self.inner.parts["weight"], "bitmask": False, "shape": False}
        more = {} if self.halves else {"row_offsets": False}
        return {**numbers, **more, **{name: kind for name, kind in self.inner.parts.items() if name != "weight"}}

    @property
    def optional(self) -> Mapping[str, bool]:
        """Optional parts of `inner`."""
        return self.inner.optional

    @property
    def bits_per_number(self) -> float:
        """Bits per number of `inner`: zeros are kept like any other number."""
        return self.inner.bits_per_number

    @property
    def notes(self) -> tuple[str, ...]:
        """Note that the format runs dense."""
        return (*self.inner.notes, NOTE)

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """(n, k) from the bits; what the parts are when they do not fit each other."""
        mask, numbers = shapes["bitmask"], shapes["compressed"]
        if len(mask) != 2 or (self.halves and numbers != (mask[0], mask[1] * 4)):
            return numbers
        return mask[0], mask[1] * 8

    def load(self, raw: Mapping[str, Host], dtype: Dtype) -> QWeight:
        """The weight with its zeros, by `inner`."""
        return self.inner.load(self.expand(raw), dtype)

    def expand(self, raw: Mapping[str, Host]) -> dict[str, Host]:
        """The parts that `inner` reads, the matrix with its zeros; `ModelError` when they do not fit each other."""
        n, k = self.shape({name: t.shape for name, t in raw.items()})
        if (shape := raw["shape"].reshape(-1).tolist()) != [n, k]:
            raise ModelError(f"shape is {shape}, bitmask is of {[n, k]}; the file is damaged")
        mask = expect(raw, "bitmask", (n, k // 8), U8)
        places = np.unpackbits(mask, axis=1, bitorder="little").view(np.bool_)
        numbers = raw["compressed"].reshape(-1)
        if (count := int(places.sum())) != numbers.size:
            raise ModelError(f"compressed has {numbers.size} numbers, bitmask {count} places; damaged")
        if self.halves and (places.reshape(n, k // 4, 4).sum(-1) != 2).any():
            raise ModelError("bitmask has not two places in every four; the file is damaged")
        dense = np.zeros((n, k), numbers.dtype)
        dense[places] = numbers
        return {**raw, "weight": dense}
