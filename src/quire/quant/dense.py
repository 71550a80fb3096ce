"""Unquantized weights: bf16 or f32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quire.ops.weights import Weight
from quire.quant.base import FLOAT_KINDS, QWeight


class Dense:
    """One float tensor per matrix. Float16 on disk becomes bf16 or f32: the CPU has no float16 dot products."""

    name = "dense"
    parts: Mapping[str, bool] = {"weight": True}

    def detect(self, names: set[str], config: Mapping[str, Any]) -> bool:
        """A checkpoint that declares no quantization is dense."""
        return not config

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The tensor's own shape."""
        return shapes["weight"]

    def load(self, raw: Mapping[str, Tensor], dtype: torch.dtype) -> QWeight:
        """raw["weight"] [n, k] as `dtype` (bfloat16 or float32)."""
        return QWeight(Weight(FLOAT_KINDS[dtype], raw["weight"].to(dtype)))
