"""Weight matrices as ops see them: rows of numbers or of integer codes with group scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Weight:
    """A matrix [n, k] in its plain (unpacked) form.

    `kind` "f32" | "bf16": `codes` is the matrix itself.
    `kind` "int8" | "int4": `codes` [n, k] int8 holds signed codes (int4: -8..7), `scales` [n, k / group] float16;
    the value is code * scale. With `zeros` [n, k / group] int8 the value is (code - zero) * scale.
    """

    kind: str
    codes: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    group: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """(rows n = output features, columns k = input features)."""
        return int(self.codes.shape[0]), int(self.codes.shape[1])

    def dequantize(self) -> Tensor:
        """The matrix as float32 [n, k]."""
        if self.scales is None:
            return self.codes.float()
        codes = self.codes.float().view(*self.scales.shape, self.group)
        if self.zeros is not None:
            codes = codes - self.zeros.float()[..., None]
        return (codes * self.scales.float()[..., None]).flatten(1)


@dataclass(frozen=True)
class Packed:
    """A matrix in the layout a backend streams. `buffers` keeps its memory alive; `handle` is the backend's own."""

    kind: str
    n: int
    k: int
    group: int
    nbytes: int
    buffers: tuple[Tensor, ...]
    handle: Any = None
    plain: Weight | None = None


def plain_packed(weight: Weight) -> Packed:
    """The reference backend's packing: none."""
    n, k = weight.shape
    tensors = tuple(t for t in (weight.codes, weight.scales, weight.zeros) if t is not None)
    size = sum(t.numel() * t.element_size() for t in tensors)
    return Packed(weight.kind, n, k, weight.group, size, tensors, plain=weight)


def quantize_activations(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Rows x [t, k] f32 to int8 codes and f32 scales [t, k / group], symmetric, scale = max|x| / 127, half to even.

    One scale per group, not per token: one outlier channel must not cost the other channels their precision.
    """
    groups = x.reshape(x.shape[0], x.shape[1] // group, group)
    top = groups.abs().amax(-1)
    scale = top / 127.0
    inverse = torch.where(top > 0, 127.0 / top, torch.zeros_like(top))
    codes = torch.round(groups * inverse[..., None]).clamp(-127, 127)
    return codes.flatten(1), scale
