"""GPTQ checkpoints (Frantar et al. 2022) as auto-gptq and gptqmodel write them.

`qweight` int32 [k * bits / 32, n] packed down the columns; `qzeros` int32 [groups, n * bits / 32] packed along the
rows; `scales` [groups, n]; `g_idx` int32 [k], the group of each column. The value is (code - zero) * scale.
Checkpoint format "gptq" (v1) stores zero - 1, "gptq_v2" and "gptq_p" the zero itself. Codes of 5 to 7 bits, and in
"gptq_p" those of 3, lie in planes (`packed.PLANES`). Activations have 16 bits. Rules of `dynamic` give matrices bits,
groups and zeros of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from quire.core.dtypes import I32, I64, Dtype
from quire.core.errors import ModelError
from quire.ops.arrays import Host
from quire.quant import fp8
from quire.quant.base import Fields, QuantScheme, QWeight
from quire.quant.packed import (
    PLANES,
    SCALES,
    expect,
    group_count,
    grouped,
    loaded_bits,
    order_of,
    signed,
    unpack,
    unpack_planes,
    unpack_rows,
)
from quire.quant.rules import by_rules, matrices_with

ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""A one in every code of a word."""
FORMS = ("gptq", "gptq_v2", "gptq_p")


@dataclass(frozen=True)
class Gptq:
    """`group` columns share a scale (-1: the whole row); `first`: zeros are stored less one.

    `symmetric` is what the file declares; the zeros that are there count all the same. `planes`: codes lie in planes.
    """

    bits: int
    group: int
    first: bool
    symmetric: bool
    planes: bool = False
    parts: Mapping[str, bool] = field(default_factory=lambda: {"qweight": False, "qzeros": False, "scales": True})
    optional: Mapping[str, bool] = field(default_factory=lambda: {"g_idx": False})
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """ "gptq int4 g128"."""
        return f"gptq int{self.bits} {'per row' if self.group == -1 else f'g{self.group}'}"

    @property
    def bits_per_number(self) -> float:
        """Codes, scales and zeros."""
        return loaded_bits(self.bits, self.group, not self.symmetric)

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """(n, k) from qweight."""
        words = shapes["qweight"]
        return (words[1], words[0] * 32 // self.bits) if len(words) == 2 else words

    def load(self, raw: Mapping[str, Host], dtype: Dtype) -> QWeight:
        """The weight, its codes and zeros less 2^(bits - 1) so that they are signed."""
        n, k = self.shape({"qweight": raw["qweight"].shape})
        if self.planes and (n % 32 or k % 32):
            raise ModelError(f"is {n} x {k}, whose codes and zeros do not fill whole planes of 32")
        groups = group_count(k, self.group)
        words = expect(raw, "qweight", (k * self.bits // 32, n), I32)
        qzeros = expect(raw, "qzeros", (groups, -(-n * self.bits // 32)), I32)
        scales = expect(raw, "scales", (groups, n), *SCALES)
        order = None
        if "g_idx" in raw:
            order = order_of(expect(raw, "g_idx", (k,), I32, I64), k, self.group)
        take_apart = unpack_planes if self.planes else unpack
        if self.first and self.bits in ONES:
            # Over the whole word, with carry: writers subtract one from the word, with borrow where a zero is 0.
            qzeros = qzeros + ONES[self.bits]
        zeros = take_apart(qzeros, self.bits)[:, :n]
        if self.first and self.bits not in ONES:  # codes cross words: writers subtract one from each
            zeros = zeros + 1 & (1 << self.bits) - 1
        zeros = np.ascontiguousarray(signed(zeros, self.bits).T)
        codes = unpack_rows(words.T, self.bits, take_apart)
        return grouped(self.bits, codes, np.ascontiguousarray(scales.T), zeros, self.group, order, activation_bits=16)


def read(config: Fields, names: Mapping[str, str]) -> QuantScheme:
    """The scheme from `quantization_config`. gptqmodel writes float8 under its own method's name, too."""
    if form_of(config).startswith("float8_"):
        return fp8.read(config, names)
    return by_rules(config, _read_one(config), matrices_with("qweight", names), _read_one)


def form_of(config: Fields) -> str:
    """What gptqmodel calls the layout of the tensors."""
    return config.text("checkpoint_format", config.text("format", "gptq"))


def _read_one(config: Fields) -> Gptq:
    bits, form = config.integer("bits", low=2, high=8), form_of(config)
    group = config.integer("group_size", low=-1)
    if group == 0:
        raise config.fail("group_size", "is 0, needs -1 (the whole row) or a number of columns")
    if form not in FORMS:
        raise config.fail("checkpoint_format", f"{form!r} cannot be read, only {', '.join(FORMS)}")
    planes = bits in PLANES and (bits > 4 or form == "gptq_p")
    return Gptq(bits, group, form == "gptq", config.flag("sym", True), planes)
