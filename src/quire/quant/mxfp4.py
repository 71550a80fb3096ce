"""MXFP4 experts as gpt-oss publishes them (Open Compute Project, Microscaling Formats 1.0): 4-bit floats in blocks.

`blocks` [n, k / 32, 16] uint8 hold two codes a byte, the lower nibble first; `scales` [n, k / 32] uint8 are powers of
two with bias 127. Codes stay codes: the kernels look them up in a table of twice the numbers, exactly, and activations
are rounded to 16 bits per group.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.core.errors import ModelError
from quire.ops.weights import Weight
from quire.quant.base import Fields, QWeight

GROUP = 32
TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True)
class Mxfp4:
    """The only form there is."""

    name: str = "mxfp4"
    parts: Mapping[str, bool] = field(default_factory=lambda: {"blocks": False, "scales": False})
    optional: Mapping[str, bool] = field(default_factory=dict)
    bits_per_number: float = 4 + 32 / GROUP
    notes: tuple[str, ...] = ()

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """(n, k) when the parts fit each other, else what they are."""
        blocks = shapes["blocks"]
        if len(blocks) != 3 or blocks[2] != GROUP // 2 or shapes["scales"] != blocks[:2]:
            return blocks
        return blocks[0], blocks[1] * GROUP

    def load(self, raw: Mapping[str, Tensor], dtype: torch.dtype) -> QWeight:
        """Codes, a table and float32 scales."""
        blocks, scales = raw["blocks"], raw["scales"]
        if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
            raise ModelError(f"blocks are {blocks.dtype} and scales {scales.dtype}, both need uint8")
        if bool((scales == 255).any()):
            raise ModelError("a scale is nan (255); the file is damaged")
        codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1).view(torch.int8)
        table = torch.tensor(TWICE, dtype=torch.int16)
        powers = torch.exp2(scales.float() - 128)
        return QWeight(Weight("table4", codes, powers, group=GROUP, table=table, activation_bits=16))


def read(config: Fields, names: Collection[str]) -> Mxfp4:
    """The format; which matrices are in it is seen from their tensors."""
    return Mxfp4()
