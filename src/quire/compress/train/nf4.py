"""Matrices kept as NF4 with double quantization (QLoRA, Dettmers et al. 2023): 4.127 bits a number.

Blocks of 64 numbers along the rows are scaled by their largest magnitude. The scales, less their mean, are kept as
float8 in blocks of 256, each scaled by its largest magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.ops.weights import E4M3_MOST
from quire.quant.codebook import NF4_NUMBERS

BLOCK, OUTER = 64, 256
ROWS = 1 << 20
"""Numbers that are turned into codes at a time, so that the work takes no more memory than some megabytes."""


@dataclass(frozen=True)
class Nf4:
    """A tensor of `shape`. `codes` uint8 [numbers / 2], two to a byte, the first in the high half.

    `scales` float8_e4m3fn [blocks]; `outer` f32 [blocks / 256, rounded up]; `mean` f32: of the scales.
    """

    shape: tuple[int, ...]
    codes: Tensor
    scales: Tensor
    outer: Tensor
    mean: float

    @classmethod
    def of(cls, tensor: Tensor, what: str) -> Nf4:
        """The nearest codes of `tensor`; `ConfigError` naming `what` where its numbers are not whole blocks, or nan."""
        if tensor.numel() % BLOCK:
            raise ConfigError(
                f"{what}: {list(tensor.shape)} is not a multiple of {BLOCK} numbers, as NF4 needs; use lora"
            )
        flat = tensor.detach().reshape(-1)
        top = torch.cat([part.float().view(-1, BLOCK).abs().amax(1) for part in torch.split(flat, ROWS)])
        if not bool(torch.isfinite(top).all()):
            raise ConfigError(f"{what}: holds nan or inf; use another checkpoint")
        mean = float(top.mean())
        blocks = torch.nn.functional.pad(top - mean, (0, -len(top) % OUTER)).view(-1, OUTER)
        outer = blocks.abs().amax(1)
        inverse = torch.where(outer > 0, E4M3_MOST / outer, 0.0)
        scales = (blocks * inverse[:, None]).clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn).flatten()[: len(top)]
        made = cls(tuple(tensor.shape), torch.empty(flat.numel() // 2, dtype=torch.uint8), scales, outer, mean)
        numbers = torch.tensor(NF4_NUMBERS)
        borders, used = (numbers[1:] + numbers[:-1]) / 2, made.block_scales()
        for i, part in enumerate(torch.split(flat, ROWS)):
            own = used[i * ROWS // BLOCK :][: part.numel() // BLOCK, None]
            scaled = part.float().view(-1, BLOCK) * torch.where(own > 0, 1 / own, 0.0)
            codes = torch.bucketize(scaled, borders).to(torch.uint8).view(-1, 2)
            made.codes[i * ROWS // 2 :][: len(codes)] = codes[:, 0] << 4 | codes[:, 1]
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return self.codes.nbytes + self.scales.nbytes + self.outer.nbytes + 4

    def block_scales(self) -> Tensor:
        """The scales f32 [blocks] as they are read."""
        outer = self.outer.repeat_interleave(OUTER)[: len(self.scales)] / E4M3_MOST
        return self.scales.float() * outer + self.mean

    def dequantize(self) -> Tensor:
        """The tensor, f32."""
        codes = torch.stack((self.codes >> 4, self.codes & 15), -1).view(-1, BLOCK)
        return (torch.tensor(NF4_NUMBERS)[codes.int()] * self.block_scales()[:, None]).view(self.shape)
