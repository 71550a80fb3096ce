"""Checkpoints of ternary weights (BitNet b1.58, Ma et al. 2024): -1, 0 or 1 times one scale of the matrix.

Packed, four rows are one of bytes: `weight` uint8 [n / 4, k], whose bits 2i and 2i + 1 are row i n / 4 + r of byte row
r, plus 1; `weight_scale` [1], which multiplies, or divides where the linear class is "bitlinear". Or `weight` holds the
floats that a training went on with ("online"), which are made ternary here: the scale is their mean magnitude.
Activations are rounded to 8 bits with a scale per row there, here with one per group of columns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from quire.core.dtypes import BF16, F16, F32, U8, Dtype
from quire.core.errors import ModelError
from quire.ops.arrays import Host, as_f32
from quire.quant.base import Fields, QuantScheme, QWeight
from quire.quant.mixed import Mixed
from quire.quant.packed import expect, grouped

LEAST = 1e-5
"""The smallest scale of floats, as where they were trained."""
OUTER = ("embed_tokens", "lm_head")
"""Ends of names of matrices that are not ternary."""


@dataclass(frozen=True)
class Packed:
    """Four ternary numbers a byte. `divides`: a number is its code over the scale."""

    divides: bool
    name: str = "bitnet"
    parts: Mapping[str, bool] = field(default_factory=lambda: {"weight": False, "weight_scale": True})
    optional: Mapping[str, bool] = field(default_factory=dict)
    bits_per_number: float = 4.25
    notes: tuple[str, ...] = ()

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Four times as many rows."""
        rows, columns = shapes["weight"]
        return 4 * rows, columns

    def load(self, raw: Mapping[str, Host], dtype: Dtype) -> QWeight:
        """The weight, in codes of 4 bits, without a change to its numbers."""
        rows, k = raw["weight"].shape
        data = expect(raw, "weight", (rows, k), U8)
        if raw["weight_scale"].size != 1 or raw["weight_scale"].dtype not in (F16, BF16, F32):
            raise ModelError(f"weight_scale holds {raw['weight_scale'].size} numbers, needs one")
        scale = float(as_f32(raw["weight_scale"]).reshape(-1)[0])
        if not np.isfinite(scale) or scale == 0:
            raise ModelError(f"weight_scale is {scale}; the file is damaged")
        codes = np.concatenate([data >> 2 * i & 3 for i in range(4)]).view(np.int8) - np.int8(1)
        if (codes > 1).any():
            raise ModelError("weight holds codes other than -1, 0 and 1; the file is damaged")
        return ternary(codes, 1 / scale if self.divides else scale)


@dataclass(frozen=True)
class Online:
    """Floats that are made ternary."""

    name: str = "bitnet floats"
    parts: Mapping[str, bool] = field(default_factory=lambda: {"weight": True})
    optional: Mapping[str, bool] = field(default_factory=dict)
    bits_per_number: float = 4.25
    notes: tuple[str, ...] = ()

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The matrix's own shape."""
        return shapes["weight"]

    def load(self, raw: Mapping[str, Host], dtype: Dtype) -> QWeight:
        """Round each number to -1, 0 or 1 times the mean magnitude."""
        weight = as_f32(raw["weight"])
        mean = max(float(np.abs(weight).mean(dtype=np.float64)), LEAST)
        codes = np.clip(np.rint(weight * np.float32(1 / mean)), -1, 1).astype(np.int8)
        return ternary(codes, mean)


def ternary(codes: Host, scale: float) -> QWeight:
    """The matrix codes [n, k] int8 times `scale`."""
    return grouped(4, codes, np.full((len(codes), 1), scale, np.float32), None, -1)


def read(config: Fields, names: Collection[str]) -> QuantScheme:
    """The scheme from `quantization_config`."""
    if config.flag("use_rms_norm", False):
        raise config.fail("use_rms_norm", "norms inside of each matrix are not supported; only false is")
    kind, mode = config.text("linear_class", "bitlinear"), config.text("quantization_mode", "offline")
    if kind not in ("bitlinear", "autobitlinear"):
        raise config.fail("linear_class", f"{kind!r} is not known; known: bitlinear, autobitlinear")
    if mode not in ("offline", "online"):
        raise config.fail("quantization_mode", f"{mode!r} is not known; known: offline, online")
    if kind == "bitlinear" or mode == "offline":
        return Packed(divides=kind == "bitlinear")
    kept = (*config.texts("modules_to_not_convert"), *OUTER)
    bases = (name.removesuffix(".weight") for name in names if name.endswith(".weight"))
    return Mixed({base: Online() for base in bases if not base.endswith(kept)})
