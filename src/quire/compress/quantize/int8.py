"""Eight-bit weights and activations: SmoothQuant (Xiao et al. 2023) and LLM.int8() (Dettmers et al. 2022).

SmoothQuant moves outliers of activations into weights, so that both can be int8: W diag(s) applied to x / s is W x.
LLM.int8() leaves the columns of outlier activations in 16 bits, and the others are int8 by rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.compress.quantize.rounding import IntegerGrid, rtn
from quire.core.errors import ConfigError, ModelError
from quire.ops.weights import CANNOT_ROUND, Weight


def scale_columns(w: Tensor, scales: Tensor) -> Tensor:
    """Multiply column j of w [n, k] by scales[j] [k], in w's dtype; the product is taken in f32."""
    return (w.float() * scales).to(w.dtype)


def unscale_norm(weight: Tensor, scales: Tensor) -> Tensor:
    """Divide a norm's weight or bias [k] by scales [k], in its dtype.

    Of a norm that multiplies by 1 + weight, give that sum and take 1 off what comes back.
    """
    return (weight.float() / scales).to(weight.dtype)


def unscale_rows(w: Tensor, scales: Tensor) -> Tensor:
    """Divide row j of the matrix w [k, m] (or bias [k]) whose outputs are the inputs by scales[j], in its dtype."""
    return (w.float() / scales.view(-1, *(1,) * (w.ndim - 1))).to(w.dtype)


def column_peaks(matrices: list[Tensor]) -> Tensor:
    """Return the largest magnitude of each column [k] f32 among matrices [n, k] that read the same input."""
    return torch.stack([w.detach().abs().amax(0).float() for w in matrices]).amax(0)


MIN_PEAK = 1e-5
"""Peaks below it count as it: a column that is never active would have an infinite factor."""


def smooth_scales(peak: Tensor, matrices: Sequence[Tensor], alpha: float = 0.5) -> Tensor:
    """Compute factors s [k] f32, by which activations are divided and columns multiplied.

    s = peak^alpha / weights' peak^(1 - alpha). `peak` [k]: the largest magnitudes of activations; `matrices` [n, k] are
    all that read them.
    """
    if not 0 <= alpha <= 1:
        raise ConfigError(f"alpha is {alpha}, needs a number from 0 to 1", param="alpha")
    weights = column_peaks(list(matrices)).clamp(min=MIN_PEAK)
    scales = peak.float().clamp(min=MIN_PEAK).pow(alpha) / weights.pow(1 - alpha)
    return scales.clamp(min=MIN_PEAK)


def smoothquant(
    peak: Tensor, matrices: Sequence[Tensor], alpha: float = 0.5, group: int = -1
) -> tuple[Tensor, list[Weight]]:
    """Return the factors [k], and each matrix times them in int8 (W8A8), a scale for each row or group of columns."""
    scales = smooth_scales(peak, matrices, alpha)
    smooth = [rtn(scale_columns(w.detach().float(), scales), IntegerGrid(8), group) for w in matrices]
    return scales, [replace(w, activation_bits=8) for w in smooth]


def w8a8_product(weight: Weight, x: Tensor) -> Tensor:
    """Multiply x [T, k] f32 by an int8 `weight` as W8A8 defines it, [T, n]: activations int8, one scale a token."""
    scale = x.abs().amax(1, keepdim=True) / 127.0
    codes = torch.where(scale > 0, x / scale, 0.0).round()
    out: Tensor = codes @ weight.dequantize().t() * scale
    return out


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
        """Return the matrix as f32 [n, k]."""
        whole: Tensor = self.weight.dequantize()
        whole[:, self.columns] = self.kept.float()
        return whole

    def product(self, x: Tensor) -> Tensor:
        """Multiply x [T, k] f32, to [T, n]: int8 by int8 with one scale a token, and outlier columns in full."""
        rest = x.clone()
        rest[:, self.columns] = 0
        return w8a8_product(self.weight, rest) + x[:, self.columns] @ self.kept.float().t()


def llm_int8(w: Tensor, columns: Tensor, dtype: torch.dtype = torch.bfloat16) -> Int8WithOutliers:
    """Round w [n, k] to int8 with the outlier `columns` [m] int64 (`InputStatistics.outlier_columns`) in `dtype`, 16
    bits.

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
