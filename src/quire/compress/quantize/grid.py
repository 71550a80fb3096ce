"""Grids: the numbers onto which groups of a matrix's columns are rounded, and how a group's scale is chosen.

Every method is one for any grid: round-to-nearest, GPTQ and AWQ ask a grid for the qparams of a group and for the nearest
of its numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from quire.compress.rows import over_rows
from quire.core.errors import ConfigError, ModelError
from quire.ops.arrays import to_numpy, to_torch
from quire.ops.lazy import array_dtype
from quire.ops.weights import CANNOT_ROUND, Weight, as_tensors
from quire.quant.codebook import CodeBook
from quire.quant.packed import GROUPS, KINDS

Measure = Callable[[Tensor], Tensor]
"""Errors of numbers [n, g, group] -> the damage [n, g] by which scales are compared."""


def squares(errors: Tensor) -> Tensor:
    """The squared error of each group."""
    return errors.square().sum(-1)


def weighted_squares(importance: Tensor, group: int) -> Measure:
    """The squared error with a factor for each column: `importance` [k], such as the mean square of its inputs."""
    factors = importance.view(-1, group)
    return lambda errors: (errors.square() * factors).sum(-1)


def output_error_measure(x: Tensor, group: int) -> Measure:
    """The squared error of a group's part of the outputs on the rows x [T, k] (AWQ's clip search, Lin et al. 2023)."""
    pieces = x.view(len(x), -1, group).transpose(0, 1)
    products = pieces.transpose(1, 2) @ pieces  # [g, group, group]: cheaper than outputs when T is above the group

    def measure(errors: Tensor) -> Tensor:
        turned = errors.transpose(0, 1)
        return ((turned @ products) * turned).sum(-1).t()

    return measure


@dataclass(frozen=True)
class QuantParams:
    """`scale` of each group and `zero`, the code of 0 (None: 0), in the dtype of the numbers they were found for.

    `clip`: which fraction of a group's largest magnitude the grid reaches, None where only one was tried.
    """

    scale: Tensor
    zero: Tensor | None = None
    clip: Tensor | None = None

    @staticmethod
    def of(change: Callable[..., Tensor], *all_steps: QuantParams) -> QuantParams:
        """What `change` makes of the same tensor of each of them, for every tensor that they have."""
        fields = zip(*((s.scale, s.zero, s.clip) for s in all_steps), strict=True)
        scale, zero, clip = (None if tensors[0] is None else change(*tensors) for tensors in fields)
        assert scale is not None
        return QuantParams(scale, zero, clip)

    @property
    def by_column(self) -> QuantParams:
        """As they broadcast against groups [n, g, group]."""
        return QuantParams.of(lambda t: t[..., None], self)


class Grid(ABC):
    """Numbers that are a code of few bits times a scale."""

    clips: tuple[float, ...]

    @property
    def searched(self) -> tuple[float, ...]:
        """The clips that are worth a search, those of `clips` among them, largest first."""
        return tuple(sorted({*self.clips, *clip_candidates()}, reverse=True))

    def with_clips(self, clips: tuple[float, ...]) -> Self:
        """The same grid with other `clips`."""
        return replace(self, clips=clips)  # type: ignore[type-var]

    @property
    @abstractmethod
    def code_dtype(self) -> torch.dtype:
        """That of codes in a `Weight`."""

    @abstractmethod
    def qparams(self, groups: Tensor, clip: float) -> QuantParams:
        """Steps [n, g] of groups [n, g, group], f32 or f64: the grid reaches `clip` of their largest magnitudes."""

    @abstractmethod
    def snap(self, w: Tensor, qparams: QuantParams) -> tuple[Tensor, Tensor]:
        """(codes in any dtype, the numbers they stand for) nearest to w; qparams broadcast against w."""

    @abstractmethod
    def weight(self, codes: Tensor, qparams: QuantParams, group: int, order: Tensor | None = None) -> Weight:
        """The matrix of codes [n, k] in `code_dtype` and qparams [n, k / group]."""

    def fit(self, groups: Tensor, measure: Measure = squares) -> QuantParams:
        """Steps [n, g] of groups [n, g, group]: of `clips`, for each group the one with the least damage."""
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
    """Evenly spaced fractions of a group's largest magnitude, as `clips` of a grid."""
    return tuple(most - (most - least) * i / (tries - 1) for i in range(tries))


@dataclass(frozen=True)
class IntegerGrid(Grid):
    """Integers of 2 to 8 bits; scales are rounded to float16 before codes are derived.

    Symmetric: codes -2^(bits - 1) .. 2^(bits - 1) - 1, where the number of largest magnitude gets the code that has no
    opposite, its sign kept (so scales may be negative), as in `quire.quant.rtn`; 8 bits: -127..127. Else
    (code - zero) * scale with the same codes, from a group's least number to its largest with 0 among them.
    `clips` () are those of `quire.quant.rtn`: 1, 8 / 8.5 and 8 / 9 for symmetric codes of less than 8 bits.
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
        """int8."""
        return torch.int8

    def qparams(self, groups: Tensor, clip: float) -> QuantParams:
        """Steps of the extremes of groups."""
        if self.symmetric:
            top = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
            scale = top.abs() / (self.high / clip) if self.bits == 8 else top / (self.low / clip)
            return QuantParams(scale.half().to(groups.dtype))
        least, most = (groups.amin(-1).clamp(max=0) * clip, groups.amax(-1).clamp(min=0) * clip)
        scale = ((most - least) / (self.high - self.low)).half().to(groups.dtype)
        zero = (self.low - least * _inverse(scale)).round().clamp(self.low, self.high)
        return QuantParams(scale, zero)

    def snap(self, w: Tensor, qparams: QuantParams) -> tuple[Tensor, Tensor]:
        """Codes as floats, and their numbers."""
        codes = w * _inverse(qparams.scale)
        if qparams.zero is None:
            codes = codes.round_().clamp_(self.low, self.high)
            return codes, codes * qparams.scale
        codes = codes.add_(qparams.zero).round_().clamp_(self.low, self.high)
        return codes, (codes - qparams.zero) * qparams.scale

    def weight(self, codes: Tensor, qparams: QuantParams, group: int, order: Tensor | None = None) -> Weight:
        """Kind int4 (up to 4 bits) or int8; `ModelError` where float16 does not hold a scale."""
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
        """Of powers of two, only that above and that below."""
        return (2.0, 1.0, 0.5) if self.book.powers else super().searched

    @property
    def code_dtype(self) -> torch.dtype:
        """int8."""
        return torch.int8

    def qparams(self, groups: Tensor, clip: float) -> QuantParams:
        """Steps of the largest magnitudes."""
        scale = to_torch(self.book.scale(to_numpy(groups.abs().amax(-1))))
        return QuantParams((scale * clip).float().to(groups.dtype))

    def snap(self, w: Tensor, qparams: QuantParams) -> tuple[Tensor, Tensor]:
        """Codes int8, and their numbers."""
        borders, places = (to_torch(part) for part in self.book.borders(array_dtype(w.dtype)))
        scaled = (w * _inverse(qparams.scale)).contiguous()
        codes = places[torch.bucketize(scaled, borders, out_int32=True)]
        return codes, to_torch(self.book.table).to(w.dtype)[codes.int()] * (qparams.scale / self.book.unit)

    def weight(self, codes: Tensor, qparams: QuantParams, group: int, order: Tensor | None = None) -> Weight:
        """Kind table4."""
        scales = to_numpy(_finite(qparams.scale).float())
        return replace(as_tensors(self.book.weight(to_numpy(codes), scales, group).weight), order=order)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1.0 / scale)


def _finite(scale: Tensor) -> Tensor:
    if not bool(torch.isfinite(scale).all()):
        raise ModelError(CANNOT_ROUND)
    return scale


def in_groups(w: Tensor, group: int) -> Tensor:
    """w [n, k] as groups [n, g, group] of `group` columns (-1: whole rows); `ConfigError` where they do not fit."""
    k = w.shape[1]
    width = k if group == -1 else group
    if width < 1 or k % width:
        raise ConfigError(
            f"{k} columns are not a multiple of group_size {group}; choose one that divides them", param="group_size"
        )
    return w.view(len(w), k // width, width)


def for_kernels(weight: Weight) -> Weight:
    """The same numbers with scales repeated for groups that kernels take, where those of `weight` are longer."""
    if weight.scales is None or weight.group in GROUPS:
        return weight
    native = next((g for g in GROUPS if weight.group % g == 0), None)
    if native is None:
        raise ModelError(f"has groups of {weight.group} columns, which no kernel takes; choose a multiple of 16")
    times = weight.group // native
    zeros = None if weight.zeros is None else weight.zeros.repeat_interleave(times, 1)
    return replace(weight, scales=weight.scales.repeat_interleave(times, 1), zeros=zeros, group=native)
