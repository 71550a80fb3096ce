"""Activations rounded as the reference's products of integers and of float8 take them, by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.weights import E4M3_MOST, MOST


def quantize_activations(x: Tensor, group: int, bits: int = 8) -> tuple[Tensor, Tensor]:
    """Rows x [t, k] f32 to integer codes (as f32) and f32 scales [t, k / group], symmetric, half to even.

    scale = max|x| / MOST[bits]. One scale per group, not per token: one outlier channel must not cost the others
    their precision. 16 bits are two digits of base 255, each -127..127, so that kernels multiply bytes.
    """
    most = MOST[bits]
    groups = x.reshape(x.shape[0], x.shape[1] // group, group)
    top = groups.abs().amax(-1)
    scale = top / most
    inverse = torch.where(top > 2e-34, most / top, torch.zeros_like(top))  # of anything smaller it is infinite
    codes = torch.round(groups * inverse[..., None]).clamp(-most, most)
    return codes.flatten(1), scale


def quantize_to_float8(x: Tensor, group: int, bits: int = 8) -> tuple[Tensor, Tensor]:
    """As `quantize_activations`, with codes in float8_e4m3fn (as f32): scale = max|x| / 448."""
    groups = x.reshape(x.shape[0], x.shape[1] // group, group)
    top = groups.abs().amax(-1)
    inverse = torch.where(top > 2e-34, E4M3_MOST / top, torch.zeros_like(top))
    codes = (groups * inverse[..., None]).to(torch.float8_e4m3fn)
    return codes.float().flatten(1), top / E4M3_MOST
