"""Grids of quantized numbers, the choice of a group's scale and zero point, and round-to-nearest (RTN).

Every method takes any grid: RTN, GPTQ and AWQ ask a grid for the `QuantParams` of a group and for its nearest numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from quire.core.errors import ConfigError, ModelError
from quire.ops.arrays import to_numpy, to_torch
from quire.ops.lazy import array_dtype
from quire.ops.weights import CANNOT_ROUND, Weight, as_tensors
from quire.quant import parallel_rows
from quire.quant.codebook import CodeBook
from quire.quant.packed import GROUPS, KINDS
from quire.quant.rtn import INT4, INT8

Measure = Callable[[Tensor], Tensor]
"""Errors of numbers [n, g, group] -> the damage [n, g] by which scales are compared."""


def squares(errors: Tensor) -> Tensor:
    """Sum the squared errors of each group."""
    return errors.square().sum(-1)


def weighted_squares(importance: Tensor, group: int) -> Measure:
    """Make a measure of squared errors with a factor for each column: `importance` [k], as the mean square of its
    inputs."""
    factors = importance.view(-1, group)
    return lambda errors: (errors.square() * factors).sum(-1)


def output_error_measure(x: Tensor, group: int) -> Measure:
    """Make a measure of a group's part of the squared error of outputs on rows x [T, k] (AWQ's clip search, Lin et al.
    2023)."""
    pieces = x.view(len(x), -1, group).transpose(0, 1)
    products = pieces.transpose(1, 2) @ pieces  # [g, group, group]: cheaper than outputs when T is above the group

    def measure(errors: Tensor) -> Tensor:
        turned = errors.transpose(0, 1)
        return ((turned @ products) * turned).sum(-1).t()

    return measure


@dataclass(frozen=True)
class QuantParams:
    """The parameters of groups: `scale`, and `zero`, the code of 0 (None: 0), in the dtype of the numbers they were
    found for.

    `clip`: which fraction of a group's largest magnitude the grid reaches, None where only one was tried.
    """

    scale: Tensor
    zero: Tensor | None = None
    clip: Tensor | None = None

    @staticmethod
    def of(change: Callable[..., Tensor], *all_steps: QuantParams) -> QuantParams:
        """Apply `change` to the same tensor of each of `all_qparams`, for every tensor that they have."""
        fields = zip(*((s.scale, s.zero, s.clip) for s in all_steps), strict=True)
        scale, zero, clip = (None if tensors[0] is None else change(*tensors) for tensors in fields)
        assert scale is not None
        return QuantParams(scale, zero, clip)

    @property
    def by_column(self) -> QuantParams:
        """Parameters shaped to broadcast against groups [n, g, group]."""
        return QuantParams.of(lambda t: t[..., None], self)


class Grid(ABC):
    """A set of numbers that are a code of few bits times a scale."""

    clips: tuple[float, ...]

    @property
    def searched(self) -> tuple[float, ...]:
        """The clips that are worth a search, those of `clips` among them, largest first."""
        return tuple(sorted({*self.clips, *clip_candidates()}, reverse=True))

    def with_clips(self, clips: tuple[float, ...]) -> Self:
        """Copy of the grid with other `clips`."""
        return replace(self, clips=clips)  # type: ignore[type-var]

    @property
    @abstractmethod
    def code_dtype(self) -> torch.dtype:
        """The dtype of codes in a `Weight`."""

    @abstractmethod
    def qparams(self, groups: Tensor, clip: float) -> QuantParams:
        """Find the parameters [n, g] of groups [n, g, group], f32 or f64: the grid reaches `clip` of their largest
        magnitudes."""

    @abstractmethod
    def snap(self, w: Tensor, qparams: QuantParams) -> tuple[Tensor, Tensor]:
        """Return (codes in any dtype, the numbers they stand for) nearest to w; qparams broadcast against w."""

    @abstractmethod
    def weight(self, codes: Tensor, qparams: QuantParams, group: int, order: Tensor | None = None) -> Weight:
        """Make the matrix of codes [n, k] in `code_dtype` and qparams [n, k / group]."""

    def fit(self, groups: Tensor, measure: Measure = squares) -> QuantParams:
        """Find the parameters [n, g] of groups [n, g, group]: of `clips`, each group takes the one with the least
        damage."""
        if len(self.clips) == 1:
            return self.qparams(groups, self.clips[0])
        found: dict[int, QuantParams] = {}

        def work(rows: slice) -> None:
            found[rows.start] = self._best(groups[rows], measure)

        over_rows(len(groups), groups[0].numel(), work)
        return QuantParams.of(lambda *tensors: torch.cat(tensors), *(found[start] for start in sorted(found)))

    def _best(self, groups: Tensor, measure: Measure) -> QuantParams:
        best, least = None, None
        for clip in self.clips:
            new = self.qparams(groups, clip)
            new = replace(new, clip=torch.full_like(new.scale, clip))
            damage = measure(self.snap(groups, new.by_column)[1] - groups)
            if best is None or least is None:
                best, least = new, damage
                continue
            better = damage < least
            best, least = (
                QuantParams.of(lambda a, b, better=better: torch.where(better, a, b), new, best),
                damage.minimum(least),
            )
        assert best is not None
        return best


def clip_candidates(most: float = 1.0, least: float = 0.5, tries: int = 20) -> tuple[float, ...]:
    """Return evenly spaced fractions of a group's largest magnitude, as `clips` of a grid."""
    return tuple(most - (most - least) * i / (tries - 1) for i in range(tries))


@dataclass(frozen=True)
class IntegerGrid(Grid):
    """A grid of integers of 2 to 8 bits; scales are rounded to float16 before codes are derived.

    Symmetric: codes -2^(bits - 1) .. 2^(bits - 1) - 1, where the number of largest magnitude gets the code that has no
    opposite, its sign kept (so scales may be negative), as in `quire.quant.rtn`; 8 bits: -127..127. Else (code - zero)
    * scale with the same codes, from a group's least number to its largest with 0 among them. `clips` () are those of
    `quire.quant.rtn`: 1, 8 / 8.5 and 8 / 9 for symmetric codes of less than 8 bits.
    """

    bits: int
    symmetric: bool = True
    clips: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.bits not in KINDS:
            raise ConfigError(f"codes of {self.bits} bits: there are 2 to 8", param="bits")
        if not self.clips:
            half = -self.low
            narrow = self.symmetric and self.bits < 8
            object.__setattr__(self, "clips", (1.0, half / (half + 0.5), half / (half + 1)) if narrow else (1.0,))

    @property
    def low(self) -> int:
        """The least code."""
        return -127 if self.symmetric and self.bits == 8 else -(1 << (self.bits - 1))

    @property
    def high(self) -> int:
        """The largest code."""
        return (1 << (self.bits - 1)) - 1

    @property
    def code_dtype(self) -> torch.dtype:
        """The dtype int8."""
        return torch.int8

    def qparams(self, groups: Tensor, clip: float) -> QuantParams:
        """Find the parameters of the extremes of groups."""
        if self.symmetric:
            top = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
            scale = top.abs() / (self.high / clip) if self.bits == 8 else top / (self.low / clip)
            return QuantParams(scale.half().to(groups.dtype))
        least, most = (groups.amin(-1).clamp(max=0) * clip, groups.amax(-1).clamp(min=0) * clip)
        scale = ((most - least) / (self.high - self.low)).half().to(groups.dtype)
        zero = (self.low - least * _inverse(scale)).round().clamp(self.low, self.high)
        return QuantParams(scale, zero)

    def snap(self, w: Tensor, qparams: QuantParams) -> tuple[Tensor, Tensor]:
        """Return codes as floats, and their numbers."""
        codes = w * _inverse(qparams.scale)
        if qparams.zero is None:
            codes = codes.round_().clamp_(self.low, self.high)
            return codes, codes * qparams.scale
        codes = codes.add_(qparams.zero).round_().clamp_(self.low, self.high)
        return codes, (codes - qparams.zero) * qparams.scale

    def weight(self, codes: Tensor, qparams: QuantParams, group: int, order: Tensor | None = None) -> Weight:
        """Make a weight of kind int4 (up to 4 bits) or int8; `ModelError` where float16 does not hold a scale."""
        zeros = None if qparams.zero is None else qparams.zero.to(torch.int8)
        scales = _finite(qparams.scale).half()
        return Weight(KINDS[self.bits], codes, scales, zeros, group, order=order, activation_bits=16)


@dataclass(frozen=True)
class CodeBookGrid(Grid):
    """The sixteen numbers of a code book.

    Scales are f32: a group's largest magnitude, or a power of two.

    Where scales are powers of two, ties go to the number with an even code and the scale is 2^floor(log2(largest)) over
    that of the book's largest number, as the Microscaling Formats 1.0 define both; `clips` are multiples of it.
    """

    book: CodeBook
    clips: tuple[float, ...] = (1.0,)

    @property
    def searched(self) -> tuple[float, ...]:
        """The clips worth a search; of powers of two, only that above and that below."""
        return (2.0, 1.0, 0.5) if self.book.powers else super().searched

    @property
    def code_dtype(self) -> torch.dtype:
        """The dtype int8."""
        return torch.int8

    def qparams(self, groups: Tensor, clip: float) -> QuantParams:
        """Find the scales of the largest magnitudes."""
        scale = to_torch(self.book.scale(to_numpy(groups.abs().amax(-1))))
        return QuantParams((scale * clip).float().to(groups.dtype))

    def snap(self, w: Tensor, qparams: QuantParams) -> tuple[Tensor, Tensor]:
        """Return codes int8, and their numbers."""
        borders, places = (to_torch(part) for part in self.book.borders(array_dtype(w.dtype)))
        scaled = (w * _inverse(qparams.scale)).contiguous()
        codes = places[torch.bucketize(scaled, borders, out_int32=True)]
        return codes, to_torch(self.book.table).to(w.dtype)[codes.int()] * (qparams.scale / self.book.unit)

    def weight(self, codes: Tensor, qparams: QuantParams, group: int, order: Tensor | None = None) -> Weight:
        """Make a weight of kind table4."""
        scales = to_numpy(_finite(qparams.scale).float())
        return replace(as_tensors(self.book.weight(to_numpy(codes), scales, group).weight), order=order)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1.0 / scale)


def _finite(scale: Tensor) -> Tensor:
    if not bool(torch.isfinite(scale).all()):
        raise ModelError(CANNOT_ROUND)
    return scale


def in_groups(w: Tensor, group: int) -> Tensor:
    """View w [n, k] as groups [n, g, group] of `group` columns (-1: whole rows); `ConfigError` where they don't fit."""
    k = w.shape[1]
    width = k if group == -1 else group
    if width < 1 or k % width:
        raise ConfigError(
            f"{k} columns are not a multiple of group_size {group}; choose one that divides them", param="group_size"
        )
    return w.view(len(w), k // width, width)


def for_kernels(weight: Weight) -> Weight:
    """Repeat scales of `weight` for groups that kernels take, where its own are longer; its numbers stay the same."""
    if weight.scales is None or weight.group in GROUPS:
        return weight
    native = next((g for g in GROUPS if weight.group % g == 0), None)
    if native is None:
        raise ModelError(f"has groups of {weight.group} columns, which no kernel takes; choose a multiple of 16")
    times = weight.group // native
    zeros = None if weight.zeros is None else weight.zeros.repeat_interleave(times, 1)
    return replace(weight, scales=weight.scales.repeat_interleave(times, 1), zeros=zeros, group=native)


def over_rows(n: int, k: int, work: Callable[[slice], None]) -> None:
    """Run `work` on pieces of the rows of a matrix [n, k] on all cores, as `quire.quant.parallel_rows` does for arrays.

    Each thread takes torch operations of one thread. Two threads of torch's own took 2 to 50 times the processor time
    of one whenever another process was busy, because they spin at the end of every small operation.
    """
    parallel_rows.over_rows(n, k, work, partial(torch.set_num_threads, 1))


NATIVE_GROUPS = (32, 64, 128)
"""Groups that the native extension rounds, 20 times faster and to the same bits."""


def rtn(w: Tensor, grid: Grid, group: int = 128, measure: Measure = squares) -> Weight:
    """Round w [n, k] (any float dtype) to the nearest of `grid`, in groups of `group` columns (-1: whole rows).

    Where the grid has several `clips`, each group takes the one of least damage by `measure`. `ModelError` when w holds
    nan or inf.
    """
    groups = in_groups(w.detach(), group)
    width = groups.shape[-1]
    native = {4: INT4, 8: INT8}.get(grid.bits) if isinstance(grid, IntegerGrid) else None
    if native and grid == IntegerGrid(native.bits) and measure is squares and width in NATIVE_GROUPS:
        return _with_positive_scales(as_tensors(native.quantize(to_numpy(w), width).weight))
    if not bool(torch.isfinite(w).all()):
        raise ModelError(CANNOT_ROUND)
    groups = groups.float()
    return round_to(groups, grid, grid.fit(groups, measure))


def _with_positive_scales(weight: Weight) -> Weight:
    """Make scales of int8 positive, as other tools write them, for 16-bit activations; the numbers stay the same."""
    assert weight.scales is not None
    codes, scales = weight.codes, weight.scales
    if weight.kind == "int8":
        signs = torch.where(scales < 0, -1, 1).to(torch.int8)[..., None]
        codes, scales = (codes.view(*scales.shape, -1) * signs).flatten(1), scales.abs()
    return replace(weight, codes=codes, scales=scales, activation_bits=16)


def round_to(groups: Tensor, grid: Grid, qparams: QuantParams) -> Weight:
    """Round groups [n, g, group] f32 to the nearest numbers of `grid` at qparams [n, g]."""
    codes, _ = grid.snap(groups, qparams.by_column)
    return grid.weight(codes.flatten(1).to(grid.code_dtype), qparams, groups.shape[-1])
