"""Numbers rounded as a format rounds them, with gradients as if they were not: quantization-aware training.

Straight-through estimator (Bengio et al. 2013). What comes out are exactly the numbers that are served.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.core.dtypes import Dtype
from quire.ops.reference.caches import quantize_rows
from quire.ops.reference.layers import quantize_activations, quantize_to_float8


class _Through(torch.autograd.Function):
    """`rounded` with the gradient of x; x + (rounded - x) would be off in the last bit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """`rounded`, in x's shape and dtype, with x's gradient."""
    through: Tensor = _Through.apply(x, rounded.to(x.dtype))  # type: ignore[no-untyped-call]
    return through


def fake_int8(x: Tensor, group: int) -> Tensor:
    """Activations x [..., k] rounded to int8 with a scale per token and group of columns, as kernels round them."""
    return _activations(x, group, quantize_activations)


def fake_fp8(x: Tensor, group: int) -> Tensor:
    """As `fake_int8`, to float8_e4m3fn."""
    return _activations(x, group, quantize_to_float8)


def _activations(x: Tensor, group: int, quantize: Any) -> Tensor:
    rows = x.detach().float().reshape(-1, x.shape[-1])
    codes, scales = quantize(rows, group)
    rounded = (codes.view(*scales.shape, group) * scales[..., None]).view_as(x)
    return straight_through(x, rounded)


def fake_cache(x: Tensor, dtype: Dtype) -> Tensor:
    """Keys or values x [..., head_dim] as a cache of `dtype` (int8 or float8_e4m3fn) gives them back.

    One scale per token and head, as the caches here have it.
    """
    codes, scales = quantize_rows(x.detach().float(), dtype)
    return straight_through(x, codes.float() * scales[..., None])
