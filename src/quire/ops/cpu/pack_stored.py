"""Matrices packed right out of what their file holds: each byte is read once and each packed one written once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from quire.core.dtypes import BF16, F32, I64
from quire.core.errors import ModelError
from quire.ops.arrays import Host, address
from quire.ops.cpu.matrix import Numbers, assemble, part_sizes, table_digits
from quire.ops.cpu.state import Cpu
from quire.ops.descriptors import RoundingDescriptor
from quire.ops.facts import LANES
from quire.ops.kinds import KINDS, NUMBERS
from quire.ops.native import huge_bytes
from quire.ops.weights import CANNOT_ROUND, BlockForm, Packed, RoundForm, RowSelection, StoredMatrix

FORMS_OF_32 = {name: number for number, name in enumerate(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"))}
"""Format in blocks of 32 -> its number in csrc/pack_blocks32.cpp."""


def file_format(form: BlockForm) -> tuple[str, int]:
    """What ends the names of the native ops that read rows in `form`, and what they call it."""
    in_super = bool(KINDS[form.kind].multiples)
    return ("blocks", NUMBERS[form.kind]) if in_super else ("blocks32", FORMS_OF_32[form.name])


def pack_stored(cpu: Cpu, stored: StoredMatrix) -> Packed:
    """`stored` packed for the native `linear`; `ModelError` when a scale is nan or inf."""
    (n, k), form = stored.shape, stored.form
    if any(len(part) % LANES for part in stored.parts[:-1]):  # 16 rows go into one block
        stored = replace(stored, parts=(stored.whole,))
    mins, wide, table = (form.mins, form.wide, form.table) if isinstance(form, BlockForm) else (False, False, ())
    sizes = part_sizes(form.kind, (n, k), form.group, wide)
    written = ("codes", "scales", "mins") if mins else ("codes", "scales")
    out = {name: huge_bytes(sizes[name][0]) for name in written}
    blocks, done = -(-n // LANES), 0
    for part in stored.parts:
        data = part.data if part.data.strides[1] == part.data.itemsize else np.ascontiguousarray(part.data)
        rows = RowSelection(data, _within(part.order, len(data)))
        at = {name: address(t) + done // LANES * (t.size // blocks) for name, t in out.items()}
        if isinstance(form, BlockForm):
            _pack_blocks(cpu, at, rows, k, form)
        else:
            _round(cpu, at, rows, k, form)
        done += len(rows)
    shared = {"table": table_digits(np.array(table))} if table else {}
    return assemble(form.kind, (n, k), form.group, Numbers(wide), out | shared)


def _within(order: Host | None, rows: int) -> Host | None:
    """`order` as native code reads it; `ValueError` when it names a row that is not there."""
    if order is not None and not (int(order.min()) >= 0 and int(order.max()) < rows):
        raise ValueError(f"an order names rows that are not among {rows}")
    return None if order is None else np.ascontiguousarray(order, I64)


def _pack_blocks(cpu: Cpu, at: Mapping[str, int], rows: RowSelection, k: int, form: BlockForm) -> None:
    bad = np.zeros(1, I64)
    name, number = file_format(form)
    cpu.call(
        f"pack_{name}",
        at["codes"], at["scales"], at.get("mins"), bad, rows.data,
        rows.order, len(rows), k, rows.data.strides[0] // rows.data.itemsize, number,
    )  # fmt: skip
    if bad.item():
        raise ModelError("a scale or minimum is nan or inf; the file is damaged")


def _round(cpu: Cpu, at: Mapping[str, int], rows: RowSelection, k: int, form: RoundForm) -> None:
    data = rows.data
    bad, divisors = np.zeros(1, I64), np.array(form.divisors, F32)
    rounding = RoundingDescriptor(
        divisors=address(divisors), tries=len(divisors), k=k, stride=data.strides[0], group=form.group,
        low=form.low, high=form.high, bits=form.bits, bf16=int(data.dtype == BF16),
    )  # fmt: skip
    cpu.call("round_pack", at["codes"], at["scales"], bad, data, rows.order, rounding, len(rows))
    if bad.item():
        raise ModelError(CANNOT_ROUND)
