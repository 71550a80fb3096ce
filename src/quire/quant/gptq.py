"""GPTQ checkpoints (Frantar et al. 2022) as auto-gptq and gptqmodel write them.

`qweight` int32 [k * bits / 32, n] packed down the columns; `qzeros` int32 [groups, n * bits / 32] packed along the
rows; `scales` [groups, n]; `g_idx` int32 [k], the group of each column. The value is (code - zero) * scale.
Checkpoint format "gptq" (v1) stores zero - 1, "gptq_v2" the zero itself. Activations have 16 bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.core.errors import ModelError
from quire.ops.lazy import torch
from quire.quant import fp8
from quire.quant.base import Fields, QWeight
from quire.quant.fp8 import Fp8
from quire.quant.packed import (
    KINDS,
    expect,
    group_count,
    grouped,
    loaded_bits,
    order_of,
    scale_dtypes,
    signed,
    unpack,
    unpack_rows,
)

if TYPE_CHECKING:
    from torch import Tensor

ONES = {4: 0x11111111, 8: 0x01010101}
"""A one in every code of a word."""


@dataclass(frozen=True)
class Gptq:
    """`group` columns share a scale (-1: the whole row); `first`: zeros are stored less one.

    `symmetric` is what the file declares; the zeros that are there count all the same.
    """

    bits: int
    group: int
    first: bool
    symmetric: bool
    parts: Mapping[str, bool] = field(default_factory=lambda: {"qweight": False, "qzeros": False, "scales": True})
    optional: Mapping[str, bool] = field(default_factory=lambda: {"g_idx": False})
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """ "gptq int4 g128"."""
        return f"gptq {KINDS[self.bits]} {'per row' if self.group == -1 else f'g{self.group}'}"

    @property
    def bits_per_number(self) -> float:
        """Codes, scales and zeros."""
        return loaded_bits(self.bits, self.group, not self.symmetric)

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """(n, k) from qweight."""
        words = shapes["qweight"]
        return (words[1], words[0] * 32 // self.bits) if len(words) == 2 else words

    def load(self, raw: Mapping[str, Tensor], dtype: torch.dtype) -> QWeight:
        """The weight, its codes and zeros less 2^(bits - 1) so that they are signed."""
        n, k = self.shape({"qweight": tuple(raw["qweight"].shape)})
        if n * self.bits % 32:
            raise ModelError(f"has {n} rows, whose zeros do not fill whole words of 32 bits")
        groups = group_count(k, self.group)
        words = expect(raw, "qweight", (k * self.bits // 32, n), torch.int32)
        qzeros = expect(raw, "qzeros", (groups, n * self.bits // 32), torch.int32)
        scales = expect(raw, "scales", (groups, n), *scale_dtypes())
        order = None
        if "g_idx" in raw:
            order = order_of(expect(raw, "g_idx", (k,), torch.int32, torch.int64), k, self.group)
        if self.first:
            # Over the whole word, with carry: writers subtract one from the word, with borrow where a zero is 0.
            qzeros = qzeros + ONES[self.bits]
        zeros = signed(unpack(qzeros, self.bits), self.bits).t().contiguous()
        codes = unpack_rows(words.t(), self.bits)
        return grouped(self.bits, codes, scales.t().contiguous(), zeros, self.group, order, activation_bits=16)


def read(config: Fields, names: Collection[str]) -> Gptq | Fp8:
    """The scheme from `quantization_config`. gptqmodel writes float8 under its own method's name, too."""
    form = config.text("checkpoint_format", config.text("format", "gptq"))
    if form.startswith("float8_"):
        return fp8.read(config, names)
    bits = config.integer("bits", low=2, high=8)
    if bits not in KINDS:
        raise config.fail("bits", f"is {bits}, only 4 and 8 can be read; use the unquantized checkpoint")
    group = config.integer("group_size", low=-1)
    if group == 0:
        raise config.fail("group_size", "is 0, needs -1 (the whole row) or a number of columns")
    if form not in ("gptq", "gptq_v2"):
        raise config.fail("checkpoint_format", f"{form!r} cannot be read, only gptq and gptq_v2")
    if any(not name.startswith("-:") for name in config.child("dynamic").raw):
        raise config.fail("dynamic", "bits or groups that differ by layer cannot be read, only layers left out (-:)")
    return Gptq(bits, group, form == "gptq", config.flag("sym", True))
