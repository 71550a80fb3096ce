"""GGUF's block formats as the weights the kernels take: codes, scales and minimums are only put in another order.

A matrix `x.weight` may have a tensor `x.scale` of one number, by which its numbers are multiplied (NVFP4). That of its
activations, `x.input_scale`, is for those who round these to as few bits.

A file mixes formats, so the file's scheme holds one scheme per block type, and which of them a matrix has is the suffix
its tensor goes by here: `blk.0.attn_q.Q4_K` is the bytes uint8 [n, bytes of a row] of a tensor in Q4_K.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from quire.core.dtypes import Dtype
from quire.core.errors import ModelError
from quire.gguf.block_types import BLOCKS, BlockType
from quire.ops.arrays import Host, as_f32
from quire.ops.kinds import SUPER_KINDS
from quire.ops.weights import BlockForm, RowSelection, StoredMatrix, Weight
from quire.quant.base import QWeight
from quire.quant.gguf_decode import FORMS as PLAIN_FORMS
from quire.quant.gguf_decode import Form
from quire.quant.gguf_grids import GRID_FORMS
from quire.quant.parallel_rows import over_rows
from quire.quant.stored import StoredWeight

KINDS = {4: "int4", 8: "int8"}
SCALES: Mapping[str, bool] = {"scale": True, "input_scale": True}
FORMS = PLAIN_FORMS | GRID_FORMS
TYPES = {kind.name: kind for kind in BLOCKS.values() if kind.name in FORMS}


@dataclass(frozen=True)
class Block:
    """One block type."""

    type: BlockType
    optional: Mapping[str, bool] = field(default_factory=lambda: SCALES)
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """ "Q4_K"."""
        return self.type.name

    @property
    def form(self) -> Form:
        """How its bytes are taken apart."""
        return FORMS[self.name]

    @property
    def parts(self) -> Mapping[str, bool]:
        """The bytes."""
        return {self.name: False}

    @property
    def bits_per_number(self) -> float:
        """Codes, scales, minimums."""
        return self.form.loaded_bits

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The matrix's shape from that of its bytes."""
        *rows, nbytes = shapes[self.name]
        return (*rows, nbytes // self.type.nbytes * self.type.numbers)

    def load(self, raw: Mapping[str, Host], dtype: Dtype) -> QWeight:
        """The weight; `ModelError` for scales that are nan or inf, once it is packed or taken apart."""
        data, form = raw[self.name], self.form
        if "scale" in raw:
            return QWeight(_scaled(self._widen(data), raw["scale"]))
        if not form.native:
            return QWeight(self._widen(data))
        kind, wide = self._kind, form.wide
        if form.super is not None and SUPER_KINDS:  # none without the extension, which alone packs these bytes
            kind, wide = SUPER_KINDS[form.super.bits, form.group, form.mins, bool(form.table)], False
        packed = BlockForm(self.name, kind, form.group, form.mins, wide, form.table)
        stored = StoredMatrix(packed, (RowSelection(data),), self.shape({self.name: data.shape})[1], self.type.numbers)
        return StoredWeight(stored, f"{self._kind} g{form.group}", self._widen)

    @property
    def _kind(self) -> str:
        return "table4" if self.form.table else KINDS[self.form.bits]

    def _widen(self, data: Host) -> Weight:
        form = self.form
        n, k = self.shape({self.name: data.shape})
        codes = np.empty((n, k), np.int8)
        scales = np.empty((n, k // form.group), np.float32 if form.wide else np.float16)
        mins = np.empty_like(scales) if form.mins else None
        blocks = data.reshape(n, k // self.type.numbers, self.type.nbytes)

        def work(rows: slice) -> None:
            c, s, m = form.split(blocks[rows])
            codes[rows], scales[rows] = c.reshape(-1, k), s.reshape(-1, scales.shape[1])
            if mins is not None and m is not None:
                mins[rows] = m.reshape(-1, scales.shape[1])

        over_rows(n, k, work)
        if not np.isfinite(scales).all() or not (mins is None or np.isfinite(mins).all()):
            raise ModelError("a scale or minimum is nan or inf; the file is damaged")
        table = np.array(form.table, np.int16) if form.table else None
        weight = Weight(self._kind, codes, scales, group=form.group, mins=mins, table=table)
        if form.super is not None:
            units, min_units = form.super.units(blocks)
            weight = replace(weight, units=units, min_units=min_units, bits=form.super.bits)
        return weight


def _scaled(weight: Weight, scale: Host) -> Weight:
    """`weight` times the one number of `scale`, rounded to float32 once."""
    factor = as_f32(scale).reshape(-1)
    if factor.size != 1 or not np.isfinite(factor).all():
        raise ModelError(f"its scale has {factor.size} numbers or is nan or inf, and needs one number")
    scales, mins = (None if t is None else as_f32(t) * factor for t in (weight.scales, weight.mins))
    return replace(weight, scales=scales, mins=mins, units=None, min_units=None, bits=0)


@dataclass(frozen=True)
class Gguf:
    """The formats of one file: `numbers` block type -> how many numbers of the file are in it."""

    numbers: Mapping[str, int]
    optional: Mapping[str, bool] = field(default_factory=lambda: SCALES)

    @property
    def notes(self) -> tuple[str, ...]:
        """The formats that take more memory than in the file."""
        wider = (
            f"{name}: {8 * block.type.nbytes / block.type.numbers:.2f} bits a number in the file, "
            f"{block.bits_per_number:.2f} when loaded"
            for name, block in self.members.items()
            if not block.form.native
        )
        return tuple(wider)

    @property
    def native(self) -> bool:
        """Whether the native extension packs the bytes of every format."""
        return all(block.form.native for block in self.members.values())

    @cached_property
    def members(self) -> dict[str, Block]:
        """The scheme of each block type that the file has."""
        return {name: Block(TYPES[name]) for name in self.numbers}

    @property
    def name(self) -> str:
        """ "gguf Q4_K + Q6_K", the type of most numbers first."""
        return "gguf " + " + ".join(sorted(self.numbers, key=lambda name: -self.numbers[name]))

    @property
    def parts(self) -> Mapping[str, bool]:
        """What any of the members has."""
        return dict.fromkeys(self.numbers, False)

    @property
    def bits_per_number(self) -> float:
        """The mean over the file."""
        total = sum(self.numbers.values())
        return sum(self.members[name].bits_per_number * count for name, count in self.numbers.items()) / total

    def member(self, present: Collection[str]) -> Block | None:
        """The format of one matrix from the suffixes of its tensors; None for one that is not quantized."""
        return next((self.members[s] for s in present if s in self.members), None)

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Shape of the matrix by its block type."""
        return next(iter(self.members.values())).shape(shapes)

    def load(self, raw: Mapping[str, Host], dtype: Dtype) -> QWeight:
        """Load a matrix by its block type."""
        block = self.member(raw)
        if block is None:
            raise ModelError("is in none of the file's block types")
        return block.load(raw, dtype)
