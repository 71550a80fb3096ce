"""Matrices kept as NF4 with double quantization (QLoRA, Dettmers et al. 2023): 4.127 bits a number.

Blocks and scales are those of `quantize.nf4`, so what trains is the base that is served from such a file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.compress.quantize.grid import QuantParams
from quire.compress.quantize.nf4 import NF4_BLOCK, NF4_GRID, NestedScales, nest_scales
from quire.core.errors import ConfigError
from quire.quant.codebook import NF4_NUMBERS

CHUNK = 1 << 20
"""Numbers that are turned into codes at a time, so that the work takes no more memory than some megabytes."""


@dataclass(frozen=True)
class PackedNf4:
    """A tensor of `shape`. `codes` uint8 [numbers / 2], two to a byte, the first in the high half; `nested`: the scales
    of its blocks."""

    shape: tuple[int, ...]
    codes: Tensor
    nested: NestedScales

    @classmethod
    def of(cls, tensor: Tensor, what: str) -> PackedNf4:
        """The nearest codes of `tensor`; `ConfigError` naming `what` where its numbers are not whole blocks, or nan."""
        if tensor.numel() % NF4_BLOCK:
            raise ConfigError(
                f"{what}: {list(tensor.shape)} is not a multiple of {NF4_BLOCK} numbers, as NF4 needs; use lora"
            )
        parts = torch.split(tensor.detach().reshape(-1), CHUNK)
        scales = torch.cat([NF4_GRID.fit(part.float().view(-1, 1, NF4_BLOCK)).scale for part in parts])
        if not bool(torch.isfinite(scales).all()):
            raise ConfigError(f"{what}: holds nan or inf; use another checkpoint")
        codes = torch.empty(tensor.numel() // 2, dtype=torch.uint8)
        for i, part in enumerate(parts):
            own, out = (
                scales[i * CHUNK // NF4_BLOCK :][: part.numel() // NF4_BLOCK],
                codes[i * CHUNK // 2 :][: part.numel() // 2],
            )
            found, _ = NF4_GRID.snap(part.float().view(-1, 1, NF4_BLOCK), QuantParams(own).by_column)
            pairs = found.view(torch.uint8).view(-1, 2)
            out.copy_(pairs[:, 0] << 4 | pairs[:, 1])
        return cls(tuple(tensor.shape), codes, nest_scales(scales))

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return self.codes.nbytes + self.nested.codes.nbytes + self.nested.absmax.nbytes + 4

    def dequantize(self) -> Tensor:
        """The tensor, f32."""
        codes = torch.stack((self.codes >> 4, self.codes & 15), -1).view(-1, NF4_BLOCK)
        return (torch.tensor(NF4_NUMBERS)[codes.int()] * self.nested.scales()[:, None]).view(self.shape)
