"""Round-to-nearest quantization at load: symmetric integers with one float16 scale per group of columns.

int8: codes -127..127, scale = max|w| / 127.
int4: codes -8..7. Two scales are tried per group and the one with the smaller squared error is kept: max|w| / 7, which
reaches the largest number from either side, and -m / 8 with m the number of largest magnitude (its sign kept, as in
llama.cpp's Q4_0), which uses all 16 codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.core.errors import ConfigError, ModelError
from quire.ops.weights import Weight
from quire.quant.base import QWeight

CHUNK = 1 << 20  # numbers quantized at a time: temporaries stay in the cache and small beside the model


@dataclass(frozen=True)
class RoundToNearest:
    """Symmetric per-group rounding to `bits` bits."""

    name: str
    bits: int
    head_scheme: RoundToNearest | None = None

    @property
    def head(self) -> RoundToNearest:
        """The format of the output head."""
        return self.head_scheme or self

    def check(self, what: str, columns: int, group: int) -> None:
        """Rows must be a whole number of groups: the kernels read whole groups."""
        if columns % group:
            fitting = [str(g) for g in (32, 64, 128) if columns % g == 0]
            way_out = (
                f"use --group-size {' or '.join(fitting)}" if fitting else "no group size fits; serve it unquantized"
            )
            raise ConfigError(
                f"--quantization {self.name}: the {columns} columns of {what} are not a multiple of "
                f"--group-size {group}; {way_out}",
                param="group_size",
            )

    def quantize(self, w: Tensor, group: int) -> QWeight:
        """w [n, k] to codes [n, k] int8 and scales [n, k / group] float16; `ModelError` when w has nan or inf."""
        n, k = w.shape
        self.check("the matrix", k, group)
        codes = torch.empty((n, k), dtype=torch.int8)
        scales = torch.empty((n, k // group), dtype=torch.float16)
        step = max(1, CHUNK // k)
        for at in range(0, n, step):
            rows = slice(at, at + step)
            c, s = self._round(w[rows].float().view(-1, k // group, group))
            codes[rows], scales[rows] = c.flatten(1), s
        if not bool(torch.isfinite(scales).all()):
            raise ModelError("a weight holds nan, inf or numbers beyond 8e6 and cannot be quantized")
        return QWeight(Weight(self.name, codes, scales, group=group))

    def _round(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of groups [n, g, group] f32; scales are rounded to float16 before codes are derived."""
        top = groups.abs().amax(-1)
        limit = (1 << (self.bits - 1)) - 1
        best = _codes(groups, top / limit, -limit, limit)
        if self.bits > 4:
            return best[:2]
        extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
        other = _codes(groups, -extreme / (limit + 1), -limit - 1, limit)
        better = other[2] < best[2]
        return torch.where(better[..., None], other[0], best[0]), torch.where(better, other[1], best[1])


def _codes(groups: Tensor, scale: Tensor, low: int, high: int) -> tuple[Tensor, Tensor, Tensor]:
    """(codes as f32, scale as f16, squared error) of rounding groups [n, g, group] at scale [n, g]."""
    half = scale.half()
    used = half.float()[..., None]
    inverse = torch.where(used == 0, 0.0, 1.0 / used)
    codes = (groups * inverse).round_().clamp_(low, high)
    return codes, half, (codes * used - groups).square_().sum(-1)


INT8 = RoundToNearest("int8", 8)
# The head's errors reach the logits directly, without later layers to average them.
INT4 = RoundToNearest("int4", 4, head_scheme=INT8)
