"""Four-bit code books: NF4 with double quantization (QLoRA, Dettmers et al. 2023) and MXFP4 (OCP Microscaling 1.0).

NF4 has blocks of 64 columns, whose scales are quantized in blocks of 256; MXFP4 has e2m1 numbers and a power of two as
the scale of 32 columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quire.compress.quantize.rounding import CodeBookGrid, QuantParams, in_groups, rtn
from quire.core.errors import ConfigError, ModelError
from quire.ops.weights import CANNOT_ROUND, Weight
from quire.quant.codebook import MXFP4, NF4, NF4_NUMBERS

NF4_GRID = CodeBookGrid(NF4)
NF4_BLOCK = 64
NESTED_BLOCK = 256


@dataclass(frozen=True)
class NestedScales:
    """Scales that are quantized themselves: nested_map()[codes] * absmax of their 256 + offset.

    `codes` uint8 [count] in the order of the scales' rows, `absmax` f32 [ceil(count / 256)].
    """

    codes: Tensor
    absmax: Tensor
    offset: float

    def scales(self) -> Tensor:
        """The scales f32 [count] that readers see."""
        return (
            nested_map()[self.codes.long()] * self.absmax.repeat_interleave(NESTED_BLOCK)[: len(self.codes)]
            + self.offset
        )


@cache
def nested_map() -> Tensor:
    """The numbers f32 [256], ascending, of bitsandbytes' dynamic codes (Dettmers 2015, 8-bit approximations).

    After the sign, zeros up to the first 1 are the power of ten, and what is left is a fraction: the middles of equal
    parts of [0.1, 1]. Beside them there are 0 and 1.
    """
    numbers = [0.0, 1.0]
    for power in range(7):
        borders = torch.linspace(0.1, 1, 2**power + 1)
        middles = (borders[:-1] + borders[1:]) / 2
        numbers += [sign * x for x in (10.0 ** (power - 6) * middles).tolist() for sign in (1, -1)]
    return torch.tensor(sorted(numbers))


def nest_scales(scales: Tensor) -> NestedScales:
    """Quantize scales (any shape, f32, not negative) to 8 bits by blocks of 256 of them, less their mean."""
    flat = scales.flatten().float()
    offset = flat.mean()
    left = torch.nn.functional.pad(flat - offset, (0, -len(flat) % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    absmax = left.abs().amax(1)
    numbers = nested_map()
    scaled = left * torch.where(absmax > 0, 1 / absmax, 0.0)[:, None]
    codes = torch.bucketize(scaled, (numbers[1:] + numbers[:-1]) / 2)
    return NestedScales(codes.flatten()[: len(flat)].to(torch.uint8), absmax, float(offset))


def nf4_qparams(w: Tensor, block: int = NF4_BLOCK) -> tuple[QuantParams, NestedScales]:
    """Find the scales [n, k / block] of w [n, k] as readers will see them, and what the file has of them.

    For methods that round to NF4 in another way, as GPTQ does with static scales. `ModelError` when w has nan or inf.
    """
    return _nested_qparams(NF4_GRID.fit(in_groups(w.detach().float(), block)))


def _nested_qparams(qparams: QuantParams) -> tuple[QuantParams, NestedScales]:
    if not bool(torch.isfinite(qparams.scale).all()):
        raise ModelError(CANNOT_ROUND)
    nested = nest_scales(qparams.scale)
    return QuantParams(nested.scales().view_as(qparams.scale)), nested


def nf4(w: Tensor, block: int = NF4_BLOCK) -> tuple[Weight, NestedScales]:
    """Round w [n, k] to NF4 with double quantization; also returns what the file has of its scales.

    Without double quantization it is `rtn(w, NF4_GRID, block)`. Codes are found with the scales that were not rounded,
    as bitsandbytes does, so that files are equal.
    """
    groups = in_groups(w.detach().float(), block)
    exact = NF4_GRID.fit(groups)
    qparams, nested = _nested_qparams(exact)
    codes, _ = NF4_GRID.snap(groups, exact.by_column)
    return NF4_GRID.weight(codes.flatten(1), qparams, block), nested


MXFP4_GRID = CodeBookGrid(MXFP4)
MXFP4_SEARCH_GRID = CodeBookGrid(MXFP4, (1.0, 2.0))
"""Also tries the next power of two: the definition's cuts numbers of 6 to 8 times the scale down to 6."""
MXFP4_BLOCK = 32


def mxfp4(w: Tensor, search: bool = False) -> Weight:
    """Round w [n, k] to MXFP4; with `search` each block takes the better one of two scales by its squared error."""
    return rtn(w, MXFP4_SEARCH_GRID if search else MXFP4_GRID, MXFP4_BLOCK)


def mxfp4_exponents(weight: Weight) -> Tensor:
    """Return the scales of a weight in MXFP4 as files have them: uint8 [n, k / 32], exponents of two plus 127 (e8m0).

    A block of zeros has scale 0, which e8m0 lacks; its numbers are 0 by any scale, so it gets the least.
    """
    assert weight.scales is not None
    scale = weight.scales.float() * MXFP4.unit
    return torch.where(scale > 0, scale.frexp().exponent + 126, 0).to(torch.uint8)


CHUNK = 1 << 20
"""Numbers that are turned into codes at a time, so that the work takes no more memory than some megabytes."""


@dataclass(frozen=True)
class PackedNf4:
    """A tensor of `shape` in NF4 codes, 4.127 bits a number: the frozen base of QLoRA.

    Blocks and scales are those of `nf4`, so what trains is the base that is served from such a file. `codes` uint8
    [numbers / 2], two to a byte, the first in the high half; `nested`: the scales of its blocks.
    """

    shape: tuple[int, ...]
    codes: Tensor
    nested: NestedScales

    @classmethod
    def of(cls, tensor: Tensor, what: str) -> PackedNf4:
        """Round `tensor` to the nearest codes; `ConfigError` naming `what` where its numbers are not whole blocks, or
        nan."""
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
        """The bytes of codes and scales."""
        return self.codes.nbytes + self.nested.codes.nbytes + self.nested.absmax.nbytes + 4

    def dequantize(self) -> Tensor:
        """Return the tensor, f32."""
        codes = torch.stack((self.codes >> 4, self.codes & 15), -1).view(-1, NF4_BLOCK)
        return (torch.tensor(NF4_NUMBERS)[codes.int()] * self.nested.scales()[:, None]).view(self.shape)
