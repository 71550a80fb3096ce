"""Factors between a matrix's columns and what makes their inputs: W diag(s) applied to x / s is W x."""

from __future__ import annotations

import torch
from torch import Tensor


def scale_columns(w: Tensor, scales: Tensor) -> Tensor:
    """w [n, k] with column j times scales[j] [k], in w's dtype; the product is taken in f32."""
    return (w.float() * scales).to(w.dtype)


def unscale_norm(weight: Tensor, scales: Tensor) -> Tensor:
    """A norm's weight or bias [k] over scales [k], in its dtype.

    Of a norm that multiplies by 1 + weight, give that sum and take 1 off what comes back.
    """
    return (weight.float() / scales).to(weight.dtype)


def unscale_rows(w: Tensor, scales: Tensor) -> Tensor:
    """The matrix w [k, m] (or bias [k]) whose outputs are the inputs, with row j over scales[j], in its dtype."""
    return (w.float() / scales.view(-1, *(1,) * (w.ndim - 1))).to(w.dtype)


def column_peaks(matrices: list[Tensor]) -> Tensor:
    """The largest magnitude of each column [k] f32 among matrices [n, k] that read the same input."""
    return torch.stack([w.detach().abs().amax(0).float() for w in matrices]).amax(0)
