"""What a weight format must offer, and the one weight class that all row-major formats share.
See docs/design/weight-formats.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import BF16, F16, F32, I8, Dtype
from quire.core.errors import ConfigError, ModelError
from quire.ops.arrays import Array, Host, concat, contiguous, equal, zeros_like
from quire.ops.weights import SUPER, Packed, StoredMatrix, Weight

if TYPE_CHECKING:
    from quire.ops.backend import Ops

PER_GROUP = ("scales", "zeros", "mins", "units", "min_units")
"""What a weight has for each row and group of columns."""


def float_kind(dtype: Dtype) -> str:
    """The kind of a `Weight` whose numbers are of `dtype`: "f32", "bf16" or "f16"."""
    return {F32: "f32", BF16: "bf16", F16: "f16"}[dtype]


@dataclass(frozen=True)
class QWeight:
    """A matrix [n, k] in some weight format, before packing.

    The three layout operations `take_rows`, `slice_cols` and `cat_rows` express tensor-parallel shards, fused QKV and
    gate/up, and the de-interleaving of rope, so a format that has them composes with all of these.
    """

    weight: Weight

    @property
    def shape(self) -> tuple[int, int]:
        """(rows n = output features, columns k = input features)."""
        return self.weight.shape

    @property
    def label(self) -> str:
        """Kind, group and bits of activations where these are 16, for reports: "bf16", "int4 g32", "int8 g128 a16"."""
        w = self.weight
        wide = f" a{w.activation_bits}" if w.group and w.activation_bits != 8 else ""
        return f"{w.kind} g{w.group}{wide}" if w.group else w.kind

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers themselves: codes at their bit width, scales, zeros, minimums."""
        n, k = self.shape
        usual = {"f32": 32, "bf16": 16, "f16": 16, "fp8": 8, "int8": 8, "int4": 4, "table4": 4}
        bits = self.weight.bits or usual[self.weight.kind]
        return n * k * bits // 8 + sum(int(t.nbytes) for t in self._groups().values())

    def _groups(self) -> dict[str, Array]:
        """What a weight has per row and group."""
        w = self.weight
        return {name: t for name in PER_GROUP if (t := getattr(w, name)) is not None}

    def _without_units(self) -> QWeight:
        """Copy of the numbers, whose scales are no longer known to be multiples of anything."""
        return QWeight(replace(self.weight, units=None, min_units=None, bits=0))

    def _changed(self, codes: Array, groups: dict[str, Array]) -> QWeight:
        changes: dict[str, Any] = groups
        return QWeight(replace(self.weight, codes=codes, **changes))

    def with_activations(self, bits: int) -> QWeight:
        """The weight with activations rounded to `bits` (8 or 16), where they are rounded to integers at all."""
        integers = self.weight.group and self.weight.kind != "fp8"
        return QWeight(replace(self.weight, activation_bits=bits)) if integers else self

    def take_rows(self, rows: slice | Array) -> QWeight:
        """The rows `rows` (a slice, or an index [m] int64 that may permute)."""
        return QWeight(self.weight.take_rows(rows))

    def slice_cols(self, start: int, stop: int) -> QWeight:
        """The columns start..stop; both must lie on group borders, otherwise `ConfigError`."""
        w = self.weight
        if w.order is not None:
            raise ConfigError("columns in an order of their own (act-order) cannot be split; use one device")
        if w.group and (start % w.group or stop % w.group):
            raise ConfigError(
                f"columns {start}..{stop} of a weight with groups of {w.group} do not lie on group borders; "
                f"use a smaller --group-size"
            )
        whole = self if start % SUPER == 0 and stop % SUPER == 0 else self._without_units()
        k = w.codes.shape[1]
        groups = {name: t[:, start * t.shape[1] // k : stop * t.shape[1] // k] for name, t in whole._groups().items()}
        return whole._changed(w.codes[:, start:stop], groups)

    def take_cols(self, cols: NDArray[np.int64]) -> QWeight:
        """The columns in the order `cols` [k], a permutation. Groups are moved; where it parts them, activations are
        put in order instead (act-order)."""
        w, each = self.weight, self.weight.group or 1
        places = cols.reshape(-1, each) if w.order is None and len(cols) % each == 0 else cols[:, None]
        if places.shape[1] != each or (places != places[:, :1] // each * each + np.arange(each)).any():
            back = np.argsort(cols) if w.order is None else np.argsort(cols)[w.order]
            return QWeight(replace(w, order=back.astype(np.int32)))
        whole, groups = self._without_units(), places[:, 0] // each
        moved = {name: t[:, groups] for name, t in whole._groups().items()}
        return whole._changed(contiguous(w.codes[:, cols]), moved)

    @staticmethod
    def cat_rows(parts: Sequence[QWeight]) -> QWeight:
        """Stack matrices of one kind, group, width, table and order of columns below each other."""
        return parts[0] if len(parts) == 1 else parts[0].above(parts[1:])

    def above(self, others: Sequence[QWeight]) -> QWeight:
        """Stack this matrix and `others` below it, as `cat_rows`."""
        first, parts = self, [self, *others]
        if any(_format(p) != _format(first) for p in parts) or not all(_same_shared(p, first) for p in parts):
            raise ConfigError(
                f"cannot fuse weights of formats {', '.join(p.label for p in parts)}: matrices that read the same "
                "input (q, k and v; gate and up) must be in one format and order of columns; use the unquantized "
                "checkpoint and --quantization"
            )
        if len({(p.weight.bits, p.weight.units is None) for p in parts}) > 1:
            parts = [p._without_units() for p in parts]
            first = parts[0]
        groups = [p._groups() for p in parts]
        if any("zeros" in g for g in groups):
            groups = [{"zeros": zeros_like(g["scales"], I8)} | g for g in groups]
        stacked = {name: concat([g[name] for g in groups]) for name in groups[0]}
        return first._changed(concat([p.weight.codes for p in parts]), stacked)

    def source(self, ops: Ops) -> Weight | StoredMatrix:
        """What the backend packs."""
        return self.weight

    def pack(self, ops: Ops, narrow: bool = True) -> Packed:
        """The weight in the layout that the backend streams; `narrow` as of `Ops.pack`."""
        return ops.pack(self.source(ops), narrow=narrow)

    def dequantize(self) -> Array:
        """The matrix as float32 [n, k]."""
        return self.weight.dequantize()


def _format(part: QWeight) -> tuple[object, ...]:
    w = part.weight
    return w.kind, w.group, w.activation_bits, part.shape[1], w.mins is None


def _same_shared(a: QWeight, b: QWeight) -> bool:
    """Whether two weights have the same table and order of columns."""
    pairs = ((a.weight.table, b.weight.table), (a.weight.order, b.weight.order))
    return all(x is y if x is None or y is None else equal(x, y) for x, y in pairs)


class Fields(Protocol):
    """The part of config.json that declares a format, read by type; `ModelError` names file and field."""

    @property
    def raw(self) -> Mapping[str, Any]:
        """The fields as they stand, empty when there are none."""
        ...

    def fail(self, name: str, reason: str) -> ModelError:
        """An error about a field, for the caller to raise."""
        ...

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        ...

    def integer(self, name: str, default: Any = ..., low: int = 1, high: int = 1 << 30) -> int:
        """An integer in [low, high]."""
        ...

    def flag(self, name: str, default: Any = ...) -> bool:
        """true or false."""
        ...

    def text(self, name: str, default: Any = ...) -> str:
        """A string."""
        ...

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings, empty when absent."""
        ...

    def child(self, name: str) -> Fields:
        """The object under `name`, empty when absent."""
        ...

    def over(self, others: Fields) -> Fields:
        """`others` with these in the place of those that both have."""
        ...


class QuantScheme(Protocol):
    """One weight format of checkpoints, with what the checkpoint's config says of it.

    A matrix is in the format when any of `parts` other than "weight" is there; otherwise it is dense.
    """

    @property
    def name(self) -> str:
        """Name of the format in reports."""
        ...

    @property
    def parts(self) -> Mapping[str, bool]:
        """Suffix of each of a linear layer's tensors on disk -> whether it holds floating-point numbers."""
        ...

    @property
    def optional(self) -> Mapping[str, bool]:
        """Work like `parts`, for tensors that may be absent."""
        ...

    @property
    def bits_per_number(self) -> float:
        """Bits that a number of a matrix takes when loaded, scales included; 0: as many as one left unquantized."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of how the format is served."""
        ...

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The matrix's (n, k) from the shapes of its parts on disk; anything else for parts that are no matrices."""
        ...

    def load(self, raw: Mapping[str, Host], dtype: Dtype) -> QWeight:
        """The weight from its parts on disk; `dtype` is that of unquantized numbers. `ModelError` names the part."""
        ...


class Quantizer(Protocol):
    """A format that can be made from 16- or 32-bit weights at load. `head` makes the output head."""

    @property
    def name(self) -> str:
        """What `--quantization` calls it."""
        ...

    @property
    def head(self) -> Quantizer:
        """The format of the output head, which may ask for more bits than the rest."""
        ...

    def check(self, what: str, columns: int, group: int) -> None:
        """Raise `ConfigError` naming `what` when rows of `columns` numbers cannot be cut into groups of `group`."""
        ...

    def quantize(self, w: Host, group: int) -> QWeight:
        """The matrix w [n, k] (any float dtype) in this format."""
        ...

    def at_pack(self, w: Host, group: int) -> QWeight:
        """Quantize a matrix when it is packed at the latest."""
        ...
