"""NF4 with double quantization (QLoRA, Dettmers et al. 2023): blocks of 64 columns, scales in blocks of 256."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quire.compress.quantize.grid import CodeBookGrid, QuantParams, in_groups
from quire.core.errors import ModelError
from quire.ops.weights import CANNOT_ROUND, Weight
from quire.quant.codebook import NF4

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
    """Scales (any shape, f32, not negative) quantized to 8 bits by blocks of 256 of them, less their mean."""
    flat = scales.flatten().float()
    offset = flat.mean()
    left = torch.nn.functional.pad(flat - offset, (0, -len(flat) % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    absmax = left.abs().amax(1)
    numbers = nested_map()
    scaled = left * torch.where(absmax > 0, 1 / absmax, 0.0)[:, None]
    codes = torch.bucketize(scaled, (numbers[1:] + numbers[:-1]) / 2)
    return NestedScales(codes.flatten()[: len(flat)].to(torch.uint8), absmax, float(offset))


def nf4_qparams(w: Tensor, block: int = NF4_BLOCK) -> tuple[QuantParams, NestedScales]:
    """Steps [n, k / block] of w [n, k] as readers will see them, and what the file has of them.

    For methods that round to NF4 in another way, as GPTQ does with static qparams. `ModelError` when w has nan or inf.
    """
    return _nested_qparams(NF4_GRID.fit(in_groups(w.detach().float(), block)))


def _nested_qparams(qparams: QuantParams) -> tuple[QuantParams, NestedScales]:
    if not bool(torch.isfinite(qparams.scale).all()):
        raise ModelError(CANNOT_ROUND)
    nested = nest_scales(qparams.scale)
    return QuantParams(nested.scales().view_as(qparams.scale)), nested


def nf4(w: Tensor, block: int = NF4_BLOCK) -> tuple[Weight, NestedScales]:
    """w [n, k] in NF4 with double quantization, and what the file has of its scales; without it: `rtn(w, GRID, block)`.

    Codes are found with the scales that were not rounded, as bitsandbytes does, so that files are equal.
    """
    groups = in_groups(w.detach().float(), block)
    exact = NF4_GRID.fit(groups)
    qparams, nested = _nested_qparams(exact)
    codes, _ = NF4_GRID.snap(groups, exact.by_column)
    return NF4_GRID.weight(codes.flatten(1), qparams, block), nested
