"""Rotary position embedding (Su et al. 2021): the cosine and sine table and the kinds of context extension.

Angles are float32 products position * inverse frequency, as transformers computes them: at large positions another
order of operations differs in the third digit of the angle. Powers, cosines and sines are those of float64, rounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import F32, F64
from quire.core.errors import ModelError
from quire.model.disk.hf_config import HfConfig

Floats = NDArray[np.float32]


class Scaling(Protocol):
    """How a context extension changes the frequencies, and what it multiplies cosines and sines with."""

    @property
    def attention_factor(self) -> float:
        """Factor of cosines and sines."""
        ...

    @property
    def stretch(self) -> float:
        """How many times `max_position_embeddings` a sequence may be long, if the file says nothing longer."""
        ...

    def inverse_frequencies(self, theta: float, dim: int, max_len: int) -> Floats:
        """Radians per position [dim / 2] f32 for a model that serves sequences of up to `max_len` tokens."""
        ...


def _periods(theta: float, dim: int) -> Floats:
    exponents = np.arange(0, dim, 2, dtype=F32) / np.float32(dim)
    found: Floats = np.power(np.float64(np.float32(theta)), exponents.astype(F64)).astype(F32)
    return found


@dataclass(frozen=True)
class Plain:
    """No extension."""

    attention_factor: float = 1.0
    stretch: float = 1.0

    def inverse_frequencies(self, theta: float, dim: int, max_len: int) -> Floats:
        """theta^(-2i / dim)."""
        return 1.0 / _periods(theta, dim)


@dataclass(frozen=True)
class Still:
    """No rotation of dimensions that others turn: all angles are 0."""

    attention_factor: float = 1.0
    stretch: float = 1.0

    def inverse_frequencies(self, theta: float, dim: int, max_len: int) -> Floats:
        """Zeros."""
        return np.zeros(dim // 2, F32)


@dataclass(frozen=True)
class Proportional:
    """The first `turned` pairs of a head turn as if all did, by frequencies of the whole head (Gemma 4); the others
    stay. `factor` divides frequencies."""

    turned: int
    factor: float = 1.0
    attention_factor: float = 1.0
    stretch: float = 1.0

    def inverse_frequencies(self, theta: float, dim: int, max_len: int) -> Floats:
        """theta^(-2i / dim) / factor for i < turned, else 0."""
        found: Floats = 1.0 / _periods(theta, dim) / np.float32(self.factor)
        found[self.turned :] = 0.0
        return found


@dataclass(frozen=True, repr=False)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): every frequency divided by `factor`."""

    factor: float
    attention_factor: float = 1.0

    @property
    def stretch(self) -> float:
        """Interpolation stretches the context by its factor."""
        return self.factor

    def inverse_frequencies(self, theta: float, dim: int, max_len: int) -> Floats:
        """theta^(-2i / dim) / factor."""
        return 1.0 / _periods(theta, dim) / self.factor

    def __repr__(self) -> str:
        """The text that keys of packed weights and of KV stores on disk have."""
        return f"Linear(factor={self.factor!r}, attention_factor={self.attention_factor!r})"


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between blended."""

    factor: float
    low: float
    high: float
    original: int
    attention_factor: float = 1.0
    stretch: float = 1.0

    def inverse_frequencies(self, theta: float, dim: int, max_len: int) -> Floats:
        """Blend weight 0 at wavelength original / low, 1 at original / high."""
        plain = 1.0 / _periods(theta, dim)
        wavelength = 1 / plain * (2 * math.pi)
        blend = np.clip((1 / wavelength * self.original - self.low) / (self.high - self.low), 0, 1)
        blended = (1 - blend) * plain / self.factor + blend * plain
        long = np.where(wavelength > self.original / self.low, plain / self.factor, blended)
        return np.where(wavelength < self.original / self.high, plain, long)


@dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al. 2023): interpolate slow dimensions, keep fast ones, a ramp between them."""

    factor: float
    original: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    max_position: int

    @property
    def stretch(self) -> float:
        """Up to factor times the original context, whatever part of that the file claims."""
        return max(1.0, self.factor * self.original / self.max_position)

    def inverse_frequencies(self, theta: float, dim: int, max_len: int) -> Floats:
        """The ramp runs between the dimensions that turn beta_fast and beta_slow times over the original context."""
        low, high = (
            dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = (high - low) or 0.001
        ramp: Floats = (np.arange(dim // 2, dtype=F32) - np.float32(low)) / np.float32(width)
        keep = 1 - np.clip(ramp, 0, 1)
        periods = _periods(theta, dim)
        found: Floats = 1.0 / (self.factor * periods) * (1 - keep) + 1.0 / periods * keep
        return found


@dataclass(frozen=True)
class LongRope:
    """LongRoPE (Ding et al. 2024): one factor per frequency, a set for short and a set for long contexts.

    The set is that of the longest sequence asked for, `max_len`. An engine that serves longer ones than `original` has
    both, and turns each request by that of the length it may reach (`shared_tables`): switching while a sequence grows,
    as transformers does, would leave keys of two sets in its cache.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    attention_factor: float
    stretch: float = 1.0

    def inverse_frequencies(self, theta: float, dim: int, max_len: int) -> Floats:
        """theta^(-2i / dim) divided by the factors of the chosen set."""
        factors = np.array(self.long if max_len > self.original else self.short, F32)
        return 1.0 / (factors * _periods(theta, dim))


@dataclass(frozen=True)
class Dynamic:
    """NTK-aware scaling (bloc97, emozilla 2023): the base grows with the length, which stretches the slow dimensions.

    The length is that of the longest sequence the engine serves, not of each sequence as it grows: keys in the cache
    were turned by the frequencies of their step, and a request's numbers must not depend on others in its batch. Up to
    `max_position` tokens nothing is stretched, as in transformers.
    """

    factor: float
    max_position: int
    attention_factor: float = 1.0

    @property
    def stretch(self) -> float:
        """The extension the file was made for."""
        return self.factor

    def inverse_frequencies(self, theta: float, dim: int, max_len: int) -> Floats:
        """theta'^(-2i / dim), theta' = theta * (factor * length / max_position - (factor - 1))^(dim / (dim - 2))."""
        length = max(max_len, self.max_position)
        grown = self.factor * length / self.max_position - (self.factor - 1)
        return 1.0 / _periods(theta * grown ** (dim / (dim - 2)), dim)


PIECE = 1 << 14
"""Positions computed at a time: all at once would take three times the memory of the table, 1.3 GiB at a million."""


@dataclass(frozen=True)
class Rope:
    """Rotation of the first `dim` dimensions of a head, with base `theta`."""

    theta: float
    dim: int
    scaling: Scaling

    def table(self, max_len: int, longest: int = 0) -> Floats:
        """Cosines and sines [max_len, 2, dim / 2] f32, the attention factor multiplied in.

        `longest`: the length that a scaling goes by, 0 = `max_len`.
        """
        frequencies = self.scaling.inverse_frequencies(self.theta, self.dim, longest or max_len)
        table = np.empty((max_len, 2, len(frequencies)), F32)
        for start in range(0, max_len, PIECE):
            stop = min(start + PIECE, max_len)
            angles = (np.arange(start, stop, dtype=F32)[:, None] * frequencies).astype(F64)
            table[start:stop] = np.stack((np.cos(angles), np.sin(angles)), 1)
            table[start:stop] *= self.scaling.attention_factor
        return table


NO_ROPE = Rope(1.0, 0, Plain())
"""Nothing is rotated: the table has no columns."""


def read_rope(config: HfConfig, head_dim: int, max_position: int, layer_kind: str) -> Rope:
    """The rope of layers of `layer_kind`: `rope_parameters` (one, or one per kind) or `rope_theta` + `rope_scaling`.

    In families whose defaults say `fixed_alpha` the kind "dynamic" with an `alpha` is a base that does not depend on
    the length: theta * alpha^(d / (d - 2)) (HunYuan).
    """
    p = config.child("rope_scaling" if config.has("rope_scaling") else "rope_parameters")
    if isinstance(p.raw.get(layer_kind), dict):
        p = p.child(layer_kind)
    theta = p.number("rope_theta", None) or config.number("rope_theta", 10000.0)
    partial = p.number("partial_rotary_factor", None) or config.number("partial_rotary_factor", 1.0, high=1.0)
    kind = p.text("rope_type", None) or p.text("type", "default")
    dim = head_dim if kind == "proportional" else int(head_dim * partial)
    if dim < 2 or dim % 2:
        raise config.fail("head_dim", f"rope needs an even number of rotated dimensions, not {dim}")
    if kind == "dynamic" and p.has("alpha") and dim > 2 and config.flag("fixed_alpha", False):
        return Rope(theta * p.number("alpha") ** (dim / (dim - 2)), dim, Plain())
    if kind not in SCALINGS:
        raise p.fail("rope_type", f"{kind!r} is not known; known: {', '.join(SCALINGS)}")
    original = config.integer("original_max_position_embeddings", None) or p.integer(
        "original_max_position_embeddings", max_position
    )
    return Rope(theta, dim, SCALINGS[kind](p, dim, original, max_position))


def _linear(p: HfConfig, dim: int, original: int, max_position: int) -> Scaling:
    return LinearScaling(p.number("factor"))


def _llama3(p: HfConfig, dim: int, original: int, max_position: int) -> Scaling:
    low, high = p.number("low_freq_factor"), p.number("high_freq_factor")
    if high <= low:
        raise p.fail("high_freq_factor", f"is {high:g}, must be above low_freq_factor {low:g}")
    return Llama3(p.number("factor"), low, high, original)


def _yarn(p: HfConfig, dim: int, original: int, max_position: int) -> Scaling:
    factor = p.number("factor", None) or max_position / original

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    over, under = p.number("mscale", None, low=-1), p.number("mscale_all_dim", None, low=-1)
    inferred = mscale(over) / mscale(under) if over and under else mscale(1.0)
    return Yarn(
        factor,
        original,
        p.number("attention_factor", inferred),
        p.number("beta_fast", 32.0),
        p.number("beta_slow", 1.0),
        p.flag("truncate", True),
        max_position,
    )


def _longrope(p: HfConfig, dim: int, original: int, max_position: int) -> Scaling:
    factor = p.number("factor", None) or max_position / original
    inferred = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    sets = p.numbers("short_factor", dim // 2), p.numbers("long_factor", dim // 2)
    return LongRope(*sets, original, p.number("attention_factor", inferred))


def _proportional(p: HfConfig, dim: int, original: int, max_position: int) -> Scaling:
    return Proportional(int(p.number("partial_rotary_factor", 1.0, high=1.0) * dim // 2), p.number("factor", 1.0))


def _plain(p: HfConfig, dim: int, original: int, max_position: int) -> Scaling:
    return Plain()


def _dynamic(p: HfConfig, dim: int, original: int, max_position: int) -> Scaling:
    if dim <= 2:
        raise p.fail("rope_type", "'dynamic' needs more than 2 rotated dimensions")
    if p.has("alpha"):
        raise p.fail("alpha", "a fixed alpha (HunYuan's) is not supported beside 'dynamic'")
    return Dynamic(p.number("factor"), max_position)


SCALINGS = {"default": _plain, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope,
            "su": _longrope, "dynamic": _dynamic, "proportional": _proportional}  # fmt: skip


def short_reach(ropes: tuple[Rope, ...], max_len: int) -> int:
    """Tokens that a sequence may reach to be turned as a short one (LongRoPE); 0 where `max_len` makes no difference.

    `ModelError` where ropes differ in it.
    """
    found = {
        rope.scaling.original
        for rope in ropes
        if isinstance(rope.scaling, LongRope) and rope.scaling.original < max_len
    }
    if len(found) > 1:
        raise ModelError(f"config.json: original_max_position_embeddings of its ropes differ: {sorted(found)}")
    return found.pop() if found else 0


def shared_tables(ropes: tuple[Rope, ...], max_len: int) -> dict[Rope, Floats]:
    """One table per distinct rope, for `max_len` positions; `ModelError` when it cannot be made.

    Where short sequences turn in another way, rows for the positions of these follow: a position p of theirs is
    `max_len` + p.
    """
    short = short_reach(ropes, max_len)
    with np.errstate(all="ignore"):  # what is not finite is refused below
        tables = {rope: rope.table(max_len) for rope in set(ropes)}
        for rope, long in tables.items() if short else ():
            longest = short if isinstance(rope.scaling, LongRope) else max_len
            tables[rope] = np.concatenate((long, rope.table(short, longest)))
    for rope, table in tables.items():
        if not all(np.isfinite(table[i : i + PIECE]).all() for i in range(0, len(table), PIECE)):
            raise ModelError(f"config.json: the rope parameters give angles that are not finite: {rope}")
    return tables
