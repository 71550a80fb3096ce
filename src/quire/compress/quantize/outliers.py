"""LLM.int8() (Dettmers et al. 2022): columns of outlier activations stay in 16 bits, the others are int8 by rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.compress.quantize.smoothquant import w8a8_product
from quire.core.errors import ModelError
from quire.ops.weights import CANNOT_ROUND, Weight

MAX_CODE = 127.0
"""The largest code."""


@dataclass(frozen=True)
class Int8WithOutliers:
    """A matrix [n, k]: `weight` int8 with a scale per row and zeros in `columns` [m] int64, whose numbers are `kept`.

    `kept` [n, m] in 16 bits.
    """

    weight: Weight
    columns: Tensor
    kept: Tensor

    def dequantize(self) -> Tensor:
        """The matrix as f32 [n, k]."""
        whole: Tensor = self.weight.dequantize()
        whole[:, self.columns] = self.kept.float()
        return whole

    def w8a8_product(self, x: Tensor) -> Tensor:
        """Its definition on x [T, k] f32, [T, n]: int8 by int8 with one scale a token, and outlier columns in full."""
        rest = x.clone()
        rest[:, self.columns] = 0
        return w8a8_product(self.weight, rest) + x[:, self.columns] @ self.kept.float().t()


def llm_int8(w: Tensor, columns: Tensor, dtype: torch.dtype = torch.bfloat16) -> Int8WithOutliers:
    """w [n, k] with the outlier `columns` [m] int64 (`Inputs.outlier_columns`) in `dtype`, a float of 16 bits.

    Scales are f32, largest / 127 of what is left of a row, as bitsandbytes has them. `ModelError` for nan and inf.
    """
    rest = w.detach().float().clone()
    if not bool(torch.isfinite(rest).all()):
        raise ModelError(CANNOT_ROUND)
    rest[:, columns] = 0
    top = rest.abs().amax(1, keepdim=True)
    codes = (rest * torch.where(top > 0, MAX_CODE / top, 0.0)).round().to(torch.int8)
    weight = Weight("int8", codes, top / MAX_CODE, group=w.shape[1])
    return Int8WithOutliers(weight, columns, w.detach()[:, columns].to(dtype))
