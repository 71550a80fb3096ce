"""SmoothQuant (Xiao et al. 2023): outliers of activations are moved into weights, so that both can be int8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.compress.quantize.folding import column_peaks, scale_columns
from quire.compress.quantize.grid import IntegerGrid
from quire.compress.quantize.rtn import rtn
from quire.core.errors import ConfigError
from quire.ops.weights import Weight

MIN_PEAK = 1e-5
"""Peaks below it count as it: a column that is never active would have an infinite factor."""


def smooth_scales(peak: Tensor, matrices: Sequence[Tensor], alpha: float = 0.5) -> Tensor:
    """Factors s [k] f32, by which activations are divided and columns multiplied.

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
    """The factors [k] and each matrix times them in int8 (W8A8), a scale for each row or group of columns."""
    scales = smooth_scales(peak, matrices, alpha)
    smooth = [rtn(scale_columns(w.detach().float(), scales), IntegerGrid(8), group) for w in matrices]
    return scales, [replace(w, activation_bits=8) for w in smooth]


def w8a8_product(weight: Weight, x: Tensor) -> Tensor:
    """x [T, k] f32 times an int8 `weight` as W8A8 defines it, [T, n]: activations int8, one scale a token."""
    scale = x.abs().amax(1, keepdim=True) / 127.0
    codes = torch.where(scale > 0, x / scale, 0.0).round()
    out: Tensor = codes @ weight.dequantize().t() * scale
    return out
