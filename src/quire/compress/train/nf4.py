"""Matrices kept as NF4 with double quantization (QLoRA, Dettmers et al. 2023): 4.127 bits a number.

Blocks and scales are those of `quantize.nf4`, so what trains is the base that is served from such a file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.compress.quantize.grid import Steps
from quire.compress.quantize.nf4 import BLOCK, GRID, Nested, nest
from quire.core.errors import ConfigError
from quire.quant.codebook import NF4_NUMBERS

ROWS = 1 << 20
"""Numbers that are turned into codes at a time, so that the work takes no more memory than some megabytes."""


@dataclass(frozen=True)
class Nf4:
    """A tensor of `shape`. `codes` uint8 [numbers / 2], two to a byte, the first in the high half; `nested`: the scales
    of its blocks."""

    shape: tuple[int, ...]
    codes: Tensor
    nested: Nested

    @classmethod
    def of(cls, tensor: Tensor, what: str) -> Nf4:
        """The nearest codes of `tensor`; `ConfigError` naming `what` where its numbers are not whole blocks, or nan."""
        if tensor.numel() % BLOCK:
            raise ConfigError(
                f"{what}: {list(tensor.shape)} is not a multiple of {BLOCK} numbers, as NF4 needs; use lora"
            )
        parts = torch.split(tensor.detach().reshape(-1), ROWS)
        scales = torch.cat([GRID.fit(part.float().view(-1, 1, BLOCK)).scale for part in parts])
        if not bool(torch.isfinite(scales).all()):
            raise ConfigError(f"{what}: holds nan or inf; use another checkpoint")
        codes = torch.empty(tensor.numel() // 2, dtype=torch.uint8)
        for i, part in enumerate(parts):
            own, out = scales[i * ROWS // BLOCK :][: part.numel() // BLOCK], codes[i * ROWS // 2 :][: part.numel() // 2]
            found, _ = GRID.snap(part.float().view(-1, 1, BLOCK), Steps(own).by_column)
            pairs = found.view(torch.uint8).view(-1, 2)
            out.copy_(pairs[:, 0] << 4 | pairs[:, 1])
        return cls(tuple(tensor.shape), codes, nest(scales))

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return self.codes.nbytes + self.nested.codes.nbytes + self.nested.absmax.nbytes + 4

    def dequantize(self) -> Tensor:
        """The tensor, f32."""
        codes = torch.stack((self.codes >> 4, self.codes & 15), -1).view(-1, BLOCK)
        return (torch.tensor(NF4_NUMBERS)[codes.int()] * self.nested.scales()[:, None]).view(self.shape)
