"""Unquantized weights: bf16, f32 or, on GPUs, fp16."""

from __future__ import annotations

from collections.abc import Mapping

from quire.core.dtypes import Dtype
from quire.core.errors import ModelError
from quire.ops.arrays import Array, cast_to, is_tensor
from quire.ops.weights import Weight
from quire.quant.base import QWeight, float_kind
from quire.quant.parallel_rows import in_dtype


class Dense:
    """One float tensor per matrix. The CPU, without float16 dot products, makes bf16 or f32 of float16 on disk."""

    name = "dense"
    parts: Mapping[str, bool] = {"weight": True}
    optional: Mapping[str, bool] = {}
    bits_per_number = 0.0
    notes: tuple[str, ...] = ()

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The tensor's own shape."""
        return shapes["weight"]

    def load(self, raw: Mapping[str, Array], dtype: Dtype) -> QWeight:
        """raw["weight"] [n, k] as `dtype` (bfloat16, float32, or float16 where the backend multiplies that)."""
        if raw["weight"].dtype.itemsize < 2:
            raise ModelError(f"weight is {raw['weight'].dtype} and has no scale beside it; download the folder again")
        w = raw["weight"]
        return QWeight(Weight(float_kind(dtype), cast_to(w, dtype) if is_tensor(w) else in_dtype(w, dtype)))
