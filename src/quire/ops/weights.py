"""Weight matrices as ops see them: rows of numbers or of integer codes with group scales."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import I64
from quire.ops.arrays import Array, Host, as_f32, cast_to, concat, to_torch

MOST = {8: 127.0, 16: 127.0 * 256}
"""Largest code of an activation by its bits."""
TABLE_MOST = 127 * 256
SUPER = 256
"""Columns of a super-block (csrc/super_blocks.h)."""
CANNOT_ROUND = "a weight holds nan, inf or numbers beyond 8e6 and cannot be quantized"
E4M3_MOST = 448.0
"""Largest number of float8_e4m3fn."""


@dataclass(frozen=True)
class Weight:
    """A matrix [n, k] in its plain (unpacked) form, of numpy's arrays or of torch's tensors.

    `kind` "f32" | "bf16" | "f16": `codes` is the matrix itself. Products with f16 are f32.
    `kind` "bf16_f32": `codes` is a bf16 matrix whose products are those of the same numbers in f32: activations are not
    rounded (a GPU does not take it).
    `kind` "int8" | "int4": `codes` [n, k] int8 holds signed codes (int4: -8..7), `scales` [n, k / group] float16 or
    float32; the value is code * scale. With `zeros` [n, k / group] int8 the value is (code - zero) * scale; with `mins`
    [n, k / group] of the scales' dtype it is code * scale + min, and int4 codes are 0..15.
    `kind` "table4": `codes` [n, k] int8 0..15 stand for the numbers of `table` [16] int16, at most `TABLE_MOST` in
    magnitude; the value is table[code] * scale.

    `kind` "fp8": `codes` [n, k] float8_e4m3fn, `scales` [n, k / group] float32; the value is code * scale. A scale of a
    block of rows is repeated for each.

    `units` [n, k / 256] float16: scales are whole multiples of them, -128..127, one for each 256 columns; so are
    minimums of `min_units`, 0..63. `bits` of codes that take fewer than their kind gives them (0: all). What a backend
    makes of it is its own affair: the numbers are the same without.

    `order` [k] int32: column j multiplies activation order[j]. `activation_bits`: 8 or 16, of the integers that
    activations are rounded to, per group; 0: they stay floats. Those of fp8 are rounded to float8 (8, which takes a
    GPU) or to bf16 (16).
    """

    kind: str
    codes: Array
    scales: Array | None = None
    zeros: Array | None = None
    group: int = 0
    mins: Array | None = None
    table: Array | None = None
    order: Array | None = None
    activation_bits: int = 8
    units: Array | None = None
    min_units: Array | None = None
    bits: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """(rows n = output features, columns k = input features)."""
        return int(self.codes.shape[0]), int(self.codes.shape[1])

    def take_rows(self, rows: slice | Array) -> Weight:
        """The rows `rows` (a slice, or an index [m] int64 that may permute)."""
        groups = (self.scales, self.zeros, self.mins, self.units, self.min_units)
        scales, zeros, mins, units, min_units = (None if t is None else t[rows] for t in groups)
        return replace(
            self, codes=self.codes[rows], scales=scales, zeros=zeros, mins=mins, units=units, min_units=min_units
        )

    def dequantize(self) -> Array:
        """The matrix as float32 [n, k], its columns in the activations' order."""
        if self.scales is None:
            return as_f32(self.codes)
        numbers = self.codes if self.table is None else self.table[cast_to(self.codes, I64)]
        values = as_f32(numbers).reshape(*self.scales.shape, self.group)
        with np.errstate(over="ignore"):
            if self.zeros is not None:
                values = values - as_f32(self.zeros)[..., None]
            values = values * as_f32(self.scales)[..., None]
            if self.mins is not None:
                values = values + as_f32(self.mins)[..., None]
        values = values.reshape(self.shape)
        return values if self.order is None else values[:, self.order.argsort()]


@dataclass(frozen=True)
class BlockForm:
    """Rows of bytes in ggml's block format `name`, packed as `kind` in groups of `group` (csrc/pack_blocks*.cpp).

    `mins`: there are minimums. `wide`: packed scales are float32. `table` [16] int16: the numbers that codes stand for.
    """

    name: str
    kind: str
    group: int
    mins: bool
    wide: bool
    table: tuple[int, ...]


@dataclass(frozen=True)
class RoundForm:
    """Numbers [rows, k] bf16 or f32 that are rounded to codes low..high of `bits`, packed as `kind`, by groups.

    One float16 scale a group: its number of largest magnitude by the one of `divisors` that gives the smallest error.
    """

    kind: str
    bits: int
    group: int
    low: int
    high: int
    divisors: tuple[float, ...]


@dataclass(frozen=True)
class RowSelection:
    """The rows of `data` [rows, ...] in the order of the index `order` [n] int64, or as they are."""

    data: Array
    order: Array | None = None

    def __len__(self) -> int:
        return len(self.data if self.order is None else self.order)

    @property
    def ordered(self) -> Array:
        """The rows, copied where they have an order."""
        return self.data if self.order is None else self.data[self.order]

    def take(self, rows: slice | Array) -> RowSelection:
        """The rows `rows` of them."""
        if self.order is not None:
            return RowSelection(self.data, self.order[rows])
        return RowSelection(self.data[rows]) if isinstance(rows, slice) else RowSelection(self.data, rows)


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix [n, k] that is still what its file holds: `parts` below each other, in the form `form`.

    `block` columns cannot be parted.
    """

    form: BlockForm | RoundForm
    parts: tuple[RowSelection, ...]
    k: int
    block: int

    @property
    def shape(self) -> tuple[int, int]:
        """(rows n = output features, columns k = input features)."""
        return sum(len(part) for part in self.parts), self.k

    @property
    def kind(self) -> str:
        """What the matrix is packed as."""
        return self.form.kind

    @property
    def whole(self) -> RowSelection:
        """All parts as one."""
        return self.parts[0] if len(self.parts) == 1 else RowSelection(concat([part.ordered for part in self.parts]))

    def take_rows(self, rows: slice | Array) -> StoredMatrix:
        """The rows `rows` (a slice, or an index [m] int64 that may permute)."""
        return replace(self, parts=(self.whole.take(rows),))

    def slice_cols(self, start: int, stop: int) -> StoredMatrix | None:
        """The columns start..stop, None where these part a block."""
        if start % self.block or stop % self.block:
            return None
        cut = tuple(p.data[:, start * p.data.shape[1] // self.k : stop * p.data.shape[1] // self.k] for p in self.parts)
        parts = tuple(RowSelection(data, part.order) for data, part in zip(cut, self.parts, strict=True))
        return replace(self, parts=parts, k=stop - start)

    def take_cols(self, cols: NDArray[np.int64]) -> StoredMatrix | None:
        """The columns in the order `cols` [k], a permutation; None where it parts a block."""
        if self.k % self.block:
            return None
        places = cols.reshape(-1, self.block)
        if (places != places[:, :1] // self.block * self.block + np.arange(self.block)).any():
            return None
        blocks = places[:, 0] // self.block

        def moved(data: Array) -> Array:
            return data.reshape(len(data), len(blocks), -1)[:, blocks].reshape(len(data), -1)

        return replace(self, parts=tuple(RowSelection(moved(part.data), part.order) for part in self.parts))

    def below(self, others: Sequence[StoredMatrix]) -> StoredMatrix:
        """Stack this matrix and `others`, in the same form, below each other."""
        return replace(self, parts=tuple(part for stored in (self, *others) for part in stored.parts))


ARRAYS = ("codes", "scales", "zeros", "mins", "table", "order", "units", "min_units")
"""The fields of a `Weight` that are arrays."""
W = TypeVar("W", bound=Weight | StoredMatrix)


@dataclass(frozen=True)
class Packed:
    """A matrix in the layout a backend streams. `handle` is the backend's own.

    `buffers` and `shared` keep its memory alive: what grows with the rows, and what does not (a table, an order).
    """

    kind: str
    n: int
    k: int
    group: int
    nbytes: int
    buffers: tuple[Array, ...]
    handle: Any = None
    plain: Weight | None = None
    shared: tuple[Array, ...] = ()


class PackedFacts(NamedTuple):
    """A packed matrix [n, k] without its numbers; `wide`: its scales are f32; `activation_bits`: 8 or 16."""

    kind: str
    n: int
    k: int
    group: int
    wide: bool
    activation_bits: int


class PackedForm(Protocol):
    """Packed matrices as files hold them: facts, and parts that are bytes."""

    narrows: bool
    """Whether `pack` looks for fewer bits, which takes time."""

    @property
    def label(self) -> str:
        """What options make of it, for names of files."""
        ...

    def digest(self, quantized: Iterable[Callable[[Host], Weight]]) -> str:
        """Digest of small matrices as they are quantized and packed now: a rounding or a layout that changed has
        another."""
        ...

    def describe(self, packed: Packed) -> tuple[PackedFacts, dict[str, Array]]:
        """Facts of the matrix, and its parts by name."""
        ...

    def restore(self, facts: PackedFacts, parts: Mapping[str, Array]) -> Packed:
        """The inverse of `describe`, from parts (u8) that nobody looked at; `ValueError` where they cannot be its."""
        ...


def as_tensors(weight: W) -> W:
    """Copy of the weight with torch tensors, which share its memory where that may be written. Imports torch."""

    def each(part: Array | None) -> Array | None:
        return None if part is None else to_torch(part)

    changes: dict[str, Any]
    if isinstance(weight, StoredMatrix):
        changes = {"parts": tuple(RowSelection(to_torch(part.data), each(part.order)) for part in weight.parts)}
    else:
        changes = {name: each(getattr(weight, name)) for name in ARRAYS}
    return replace(weight, **changes)


def labelled(label: str, packed: Packed) -> str:
    """The label of a weight format for reports, with what packing made of it."""
    if packed.kind.startswith("super"):
        return f"{packed.kind} g{packed.group}"
    if packed.kind.startswith("sparse24_"):
        return f"{label} 2:4"
    if packed.kind.startswith("sparse_"):
        return f"{label} without zeros"
    return f"{label} in 12 bits" if packed.kind == "bf12" else label


@dataclass(frozen=True)
class PackedTable:
    """A look-up table [V, d] that stays a packed matrix. `rounded`: its rows become bf16, as those of a bf16 table."""

    matrix: Packed
    rounded: bool


@dataclass(frozen=True)
class StoredTable:
    """A look-up table [V, k] that stays what its file holds: `data` uint8 [V, bytes of a row] in `form`, of which only
    rows that are asked for are read.

    `widen`: rows of bytes as numbers. `numbers` [16] int16: those that codes stand for, None where they do not.
    """

    form: BlockForm
    data: Array
    k: int
    widen: Callable[[Host], Weight]
    numbers: Array | None = None


@dataclass(frozen=True)
class PieceTable:
    """A look-up table [V, k] in pieces of a mapped file, one below the other, of which only rows that are asked for are
    read. All pieces have as many rows as the first, the last one no more.

    `addresses` [pieces] int64: where they lie.
    """

    pieces: tuple[Host, ...]
    addresses: Host

    @property
    def rows(self) -> int:
        """V."""
        return sum(len(piece) for piece in self.pieces)


def plain_packed(weight: Weight) -> Packed:
    """The reference backend's packing: none, but that its numbers are torch's."""
    weight, (n, k) = as_tensors(weight), weight.shape
    parts = (weight.codes, weight.scales, weight.zeros, weight.mins, weight.table, weight.order)
    tensors = tuple(t for t in parts if t is not None)
    size = sum(t.nbytes for t in tensors)
    return Packed(weight.kind, n, k, weight.group, size, tensors, plain=weight)
