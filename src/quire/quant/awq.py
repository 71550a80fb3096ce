"""AWQ checkpoints (Lin et al. 2023) as AutoAWQ writes them, version "gemm".

`qweight` int32 [k, n / 8], `qzeros` int32 [groups, n / 8], both packed along the rows with interleaved nibbles: nibble
i of a word holds column `ORDER[i]` of its eight. `scales` [groups, n]. The value is (code - zero) * scale. Activations
have 16 bits. With `zero_point` false every zero is 8, and `qzeros` may be left out. gptqmodel's `dynamic` may give
matrices groups of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from quire.core.dtypes import I32, Dtype
from quire.ops.arrays import Host
from quire.quant.base import Fields, QuantScheme, QWeight
from quire.quant.packed import SCALES, expect, group_count, grouped, loaded_bits, signed
from quire.quant.parallel_rows import over_rows
from quire.quant.rules import by_rules, matrices_with

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
NIBBLE_OF = sorted(range(8), key=ORDER.__getitem__)


@dataclass(frozen=True)
class Awq:
    """`group` columns share a scale (-1: the whole row). `zeros`: there must be zeros."""

    group: int
    zeros: bool = True
    notes: tuple[str, ...] = ()

    @property
    def parts(self) -> Mapping[str, bool]:
        """Codes, scales and zeros."""
        return {"qweight": False, "scales": True} | ({"qzeros": False} if self.zeros else {})

    @property
    def optional(self) -> Mapping[str, bool]:
        """Files without zeros of their own may hold what they are."""
        return {} if self.zeros else {"qzeros": False}

    @property
    def name(self) -> str:
        """ "awq int4 g128"."""
        return f"awq int4 {'per row' if self.group == -1 else f'g{self.group}'}"

    @property
    def bits_per_number(self) -> float:
        """Codes, scales and zeros."""
        return loaded_bits(4, self.group, self.zeros)

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """(n, k) from qweight."""
        words = shapes["qweight"]
        return (words[1] * 8, words[0]) if len(words) == 2 else words

    def load(self, raw: Mapping[str, Host], dtype: Dtype) -> QWeight:
        """The weight, its codes and zeros less 8 so that they are signed."""
        n, k = self.shape({"qweight": raw["qweight"].shape})
        groups = group_count(k, self.group)
        codes = _columns(expect(raw, "qweight", (k, n // 8), I32))
        scales = expect(raw, "scales", (groups, n), *SCALES)
        zeros = _columns(expect(raw, "qzeros", (groups, n // 8), I32)) if "qzeros" in raw else None
        return grouped(4, codes, np.ascontiguousarray(scales.T), zeros, self.group, activation_bits=16)


def _columns(words: Host) -> Host:
    """Signed codes int8 [8 * c, r] of words int32 [r, c]."""
    r, c = words.shape
    codes = np.empty((c, 8, r), np.int8)

    def work(part: slice) -> None:
        turned = np.ascontiguousarray(words[:, part].T).view(np.uint32)
        for place, nibble in enumerate(NIBBLE_OF):
            codes[part, place] = signed((turned >> 4 * nibble).astype(np.uint8) & 15, 4)

    over_rows(c, 2 * r, work)  # 16 words lie in a line of the cache
    return codes.reshape(8 * c, r)


def read(config: Fields, names: Mapping[str, str]) -> QuantScheme:
    """The scheme from `quantization_config`."""
    return by_rules(config, _read_one(config), matrices_with("qweight", names), _read_one)


def _read_one(config: Fields) -> Awq:
    bits = config.integer("bits" if config.has("bits") else "w_bit", low=1, high=16)
    if bits != 4:
        raise config.fail("bits", f"is {bits}, only 4 can be read; use the unquantized checkpoint")
    group = config.integer("group_size" if config.has("group_size") else "q_group_size", low=-1)
    if group == 0:
        raise config.fail("group_size", "is 0, needs -1 (the whole row) or a number of columns")
    version = config.text("version", config.text("format", "gemm"))
    if version.lower() != "gemm":
        raise config.fail("version", f"{version!r} has another order of codes; only gemm can be read")
    return Awq(group, config.flag("zero_point", True))
