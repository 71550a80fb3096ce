"""MXFP4 (Open Compute Project, Microscaling Formats 1.0): e2m1 numbers with a power of two per 32 columns."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compress.quantize.grid import CodeBookGrid
from quire.compress.quantize.rtn import rtn
from quire.ops.weights import Weight
from quire.quant.codebook import MXFP4

MXFP4_GRID = CodeBookGrid(MXFP4)
MXFP4_SEARCH_GRID = CodeBookGrid(MXFP4, (1.0, 2.0))
"""Also tries the next power of two: the definition's cuts numbers of 6 to 8 times the scale down to 6."""
MXFP4_BLOCK = 32


def mxfp4(w: Tensor, search: bool = False) -> Weight:
    """w [n, k] in MXFP4; with `search` each block takes the better one of two scales by its squared error."""
    return rtn(w, MXFP4_SEARCH_GRID if search else MXFP4_GRID, MXFP4_BLOCK)


def mxfp4_exponents(weight: Weight) -> Tensor:
    """The scales of a weight in MXFP4 as files have them: uint8 [n, k / 32], exponents of two plus 127 (e8m0).

    A block of zeros has scale 0, which e8m0 lacks; its numbers are 0 by any scale, so it gets the least.
    """
    assert weight.scales is not None
    scale = weight.scales.float() * MXFP4.unit
    return torch.where(scale > 0, scale.frexp().exponent + 126, 0).to(torch.uint8)
