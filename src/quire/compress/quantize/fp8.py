"""Float8 (e4m3): one scale per matrix, per row, or per block of 128 x 128 (Micikevicius et al. 2022; DeepSeek-V3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.compress.quantize.rounding import Grid, QuantParams, in_groups, rtn
from quire.core.errors import ModelError
from quire.ops.weights import CANNOT_ROUND, E4M3_MOST, Weight

BLOCK = 128


@dataclass(frozen=True)
class Float8Grid(Grid):
    """A grid of float8 e4m3 numbers. Scale = largest / 448, f32, of `rows` rows by a group of columns: 1 is a row, 0
    all rows."""

    rows: int = 1
    clips: tuple[float, ...] = (1.0,)

    @property
    def searched(self) -> tuple[float, ...]:
        """No clip but 1: floats lose nothing by a scale that is too large."""
        return (1.0,)

    @property
    def code_dtype(self) -> torch.dtype:
        """The dtype float8_e4m3fn."""
        return torch.float8_e4m3fn

    def qparams(self, groups: Tensor, clip: float) -> QuantParams:
        """Find the scales [n, g], repeated for the rows that share them."""
        top = groups.abs().amax(-1)
        n = len(top)
        rows = self.rows or n
        padded = torch.nn.functional.pad(top, (0, 0, 0, -n % rows))
        shared = padded.view(-1, rows, top.shape[1]).amax(1).repeat_interleave(rows, 0)[:n]
        return QuantParams((shared / (E4M3_MOST / clip)).float().to(groups.dtype))

    def snap(self, w: Tensor, qparams: QuantParams) -> tuple[Tensor, Tensor]:
        """Return codes float8, and their numbers; what is beyond 448 becomes that, and not nan."""
        scaled = torch.where(qparams.scale > 0, w / qparams.scale, 0.0)
        codes = scaled.clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn)
        return codes, codes.to(w.dtype) * qparams.scale

    def weight(self, codes: Tensor, qparams: QuantParams, group: int, order: Tensor | None = None) -> Weight:
        """Make a weight of kind fp8."""
        if not bool(torch.isfinite(qparams.scale).all()):
            raise ModelError(CANNOT_ROUND)
        return Weight("fp8", codes, qparams.scale.float(), group=group, order=order)


PER_TENSOR, PER_ROW, PER_BLOCK = Float8Grid(0), Float8Grid(1), Float8Grid(BLOCK)


def block_columns(k: int) -> int:
    """Return the columns of a group for blocks of 128 columns of k: 128, or what divides both where the last block is
    short."""
    return math.gcd(k, BLOCK)


def per_tensor(w: Tensor) -> Weight:
    """Round w [n, k] with one scale, repeated for each row; the form that goes with static scales of activations."""
    return rtn(w, PER_TENSOR, -1)


def per_row(w: Tensor) -> Weight:
    """Round w [n, k] with a scale for each row; the form that goes with activations scaled token by token."""
    return rtn(w, PER_ROW, -1)


def per_block(w: Tensor) -> Weight:
    """Round w [n, k] with a scale for each 128 x 128 numbers; the last blocks of rows and columns may be smaller.

    Scales [n, k / `block_columns(k)`]: that of a block is scales[128 * i, 128 * j / block_columns(k)].
    """
    narrow = block_columns(w.shape[1])
    groups = in_groups(w.detach().float(), narrow)
    n, pieces, _ = groups.shape
    times = BLOCK // narrow
    top = torch.nn.functional.pad(groups.abs().amax(-1), (0, -pieces % times))
    of_block = top.view(n, -1, times).amax(-1).repeat_interleave(times, 1)[:, :pieces]
    qparams = PER_BLOCK.qparams(of_block[..., None], 1.0)
    codes, _ = PER_BLOCK.snap(groups, QuantParams.of(lambda t: t[..., None], qparams))
    return PER_BLOCK.weight(codes.flatten(1), qparams, narrow)


def activation_scale(peak: Tensor) -> Tensor:
    """Return the static scale, f32 of no axes, of activations whose columns reached `peak` [k]: largest / 448."""
    return peak.amax().float() / E4M3_MOST
