"""Checkpoints of 4-bit floats (e2m1): MXFP4 as gpt-oss has its experts; MXFP4, NVFP4 and MXFP6 of compressed-tensors.

gpt-oss: `blocks` uint8 [n, k / 32, 16], two codes to a byte with the first in the low half; `scales` uint8 [n, k / 32].

compressed-tensors:

`weight_packed` uint8 [n, k / 2], two codes to a byte with the first in the low half. MXFP4: `weight_scale` uint8
[n, k / 32], the exponent of a power of two plus 127 (Open Compute Project, Microscaling Formats 1.0). NVFP4:
`weight_scale` float8 e4m3 [n, k / 16], divided by the one number of `weight_global_scale`. MXFP6 (e2m3):
`weight_packed` uint8 [n, k * 3 / 4], a stream of codes of 6 bits, and the scales of MXFP4; its numbers are eighths up
to 7.5, so whole codes of 8 bits. Activations, which these recipes round to as many bits or not at all, keep 16.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from quire.core.dtypes import F8, U8, Dtype
from quire.core.errors import ModelError
from quire.ops.arrays import Host, as_f32
from quire.quant.base import Fields, QuantScheme, QWeight
from quire.quant.codebook import MXFP4
from quire.quant.packed import expect, grouped, powers_of_two, spread, unpack

GROUP = 32


@dataclass(frozen=True)
class Fp4:
    """`group` columns share a scale: 32 in MXFP4, 16 in NVFP4, which has a scale of the whole matrix as well."""

    name: str
    group: int
    parts: Mapping[str, bool]
    bits_per_number: float
    optional: Mapping[str, bool] = field(default_factory=lambda: {"input_global_scale": True})
    notes: tuple[str, ...] = ()

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """(n, k) from the codes."""
        data = shapes["weight_packed"]
        return (data[0], data[1] * 2) if len(data) == 2 else data

    def load(self, raw: Mapping[str, Host], dtype: Dtype) -> QWeight:
        """The weight, without a change to its numbers but the rounding of an NVFP4 scale to float32."""
        n, k = self.shape({"weight_packed": raw["weight_packed"].shape})
        data = expect(raw, "weight_packed", (n, k // 2), U8)
        if k % self.group:
            raise ModelError(f"has rows of {k} numbers in groups of {self.group}; the last group is cut")
        return MXFP4.weight(_codes(data), self._scales(raw, n, k // self.group), self.group)

    def _scales(self, raw: Mapping[str, Host], n: int, groups: int) -> Host:
        if "weight_global_scale" in self.parts:
            whole = raw["weight_global_scale"].astype(np.float32).reshape(-1)
            if whole.size != 1 or not whole[0]:
                raise ModelError("weight_global_scale is not one number other than 0; the file is damaged")
            return as_f32(expect(raw, "weight_scale", (n, groups), F8)) / whole
        return powers_of_two(expect(raw, "weight_scale", (n, groups), U8))


@dataclass(frozen=True)
class Mxfp4:
    """The form of gpt-oss."""

    name: str = "mxfp4"
    parts: Mapping[str, bool] = field(default_factory=lambda: {"blocks": False, "scales": False})
    optional: Mapping[str, bool] = field(default_factory=dict)
    bits_per_number: float = 4 + 16 / GROUP
    notes: tuple[str, ...] = ()

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """(n, k) when the parts fit each other, else what they are."""
        blocks = shapes["blocks"]
        if len(blocks) != 3 or blocks[2] != GROUP // 2 or shapes["scales"] != blocks[:2]:
            return blocks
        return blocks[0], blocks[1] * GROUP

    def load(self, raw: Mapping[str, Host], dtype: Dtype) -> QWeight:
        """The weight, without a change to its numbers."""
        n, groups, width = raw["blocks"].shape
        blocks = expect(raw, "blocks", (n, groups, width), U8)
        scales = powers_of_two(expect(raw, "scales", (n, groups), U8))
        return MXFP4.weight(_codes(blocks.reshape(n, -1)), scales, GROUP)


@dataclass(frozen=True)
class Mxfp6:
    """The form of compressed-tensors: sign, 2 bits of exponent, 3 of mantissa."""

    name: str = "mxfp6"
    parts: Mapping[str, bool] = field(default_factory=lambda: {"weight_packed": False, "weight_scale": False})
    optional: Mapping[str, bool] = field(default_factory=dict)
    bits_per_number: float = 8 + 16 / GROUP
    notes: tuple[str, ...] = ("mxfp6: codes of 6 bits take 8 when loaded",)

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """(n, k) from the codes."""
        data = shapes["weight_packed"]
        return (data[0], data[1] * 4 // 3) if len(data) == 2 else data

    def load(self, raw: Mapping[str, Host], dtype: Dtype) -> QWeight:
        """The weight, without a change to its numbers."""
        n, k = self.shape({"weight_packed": raw["weight_packed"].shape})
        if k % GROUP:
            raise ModelError(f"has rows of {k} numbers in groups of {GROUP}; the last group is cut")
        data = expect(raw, "weight_packed", (n, k * 3 // 4), U8)
        scales = powers_of_two(expect(raw, "weight_scale", (n, k // GROUP), U8))
        codes = _eighths()[unpack(np.ascontiguousarray(data).view(np.int32), 6)]
        return grouped(8, codes, scales / 8, None, GROUP, activation_bits=16)


def _eighths() -> Host:
    """Eight times the number of each code of e2m3, int8 [64]."""
    up = [m if e == 0 else (8 + m) << (e - 1) for e in range(4) for m in range(8)]
    return np.array(up + [-number for number in up], np.int8)


def read(config: Fields, names: Collection[str]) -> Mxfp4:
    """The scheme of quant_method mxfp4; which matrices are in it is seen from their tensors."""
    return Mxfp4()


def _codes(data: Host) -> Host:
    """int8 [n, 2 * bytes] of uint8 [n, bytes]: low half, high half."""
    return spread(data, 4).view(np.int8)


_PACKED = {"weight_packed": False}
FORMS: dict[str, QuantScheme] = {
    "mxfp4-pack-quantized": Fp4("mxfp4", 32, {**_PACKED, "weight_scale": False}, 4.5),
    "nvfp4-pack-quantized": Fp4(
        "nvfp4", 16, {**_PACKED, "weight_scale": True, "weight_global_scale": True}, 4 + 32 / 16
    ),
    "mxfp6-pack-quantized": Mxfp6(),
}
"""`format` of a compressed-tensors file -> how its weights are kept."""
