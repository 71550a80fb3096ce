"""Matrices packed right out of what their file holds: each byte is read once and each packed one written once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quire.core.errors import ModelError
from quire.ops.arena import huge_bytes
from quire.ops.cpu import Cpu
from quire.ops.kinds import KINDS, LANES, NUMBERS
from quire.ops.matrix import Numbers, assemble, part_sizes, table_digits
from quire.ops.weights import CANNOT_ROUND, BlockForm, Packed, RoundForm, Rows, Stored

FORMS_OF_32 = {name: number for number, name in enumerate(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"))}
"""Format in blocks of 32 -> its number in csrc/pack_blocks32.cpp."""


def pack_stored(cpu: Cpu, stored: Stored) -> Packed:
    """`stored` packed for the native `linear`; `ModelError` when a scale is nan or inf."""
    (n, k), form = stored.shape, stored.form
    if any(len(part) % LANES for part in stored.parts[:-1]):  # 16 rows go into one block
        stored = replace(stored, parts=(stored.whole,))
    mins, wide, table = (form.mins, form.wide, form.table) if isinstance(form, BlockForm) else (False, False, ())
    sizes = part_sizes(form.kind, (n, k), form.group, wide)
    written = ("codes", "scales", "mins") if mins else ("codes", "scales")
    out = {name: huge_bytes(cpu.native, sizes[name][0]) for name in written}
    blocks, done = -(-n // LANES), 0
    for part in stored.parts:
        data = part.data if part.data.stride(1) == 1 else part.data.contiguous()
        rows = Rows(data, _within(part.order, len(data)))
        at = {name: t.data_ptr() + done // LANES * (t.numel() // blocks) for name, t in out.items()}
        if isinstance(form, BlockForm):
            _pack_blocks(cpu, at, rows, k, form)
        else:
            _round(cpu, at, rows, k, form)
        done += len(rows)
    shared = {"table": table_digits(torch.tensor(table))} if table else {}
    return assemble(form.kind, (n, k), form.group, Numbers(wide), out | shared)


def _within(order: Tensor | None, rows: int) -> Tensor | None:
    """`order` as native code reads it; `ValueError` when it names a row that is not there."""
    if order is not None and not (int(order.min()) >= 0 and int(order.max()) < rows):
        raise ValueError(f"an order names rows that are not among {rows}")
    return None if order is None else order.long().contiguous()


def _pack_blocks(cpu: Cpu, at: Mapping[str, int], rows: Rows, k: int, form: BlockForm) -> None:
    bad = torch.zeros(1, dtype=torch.int64)
    in_super = bool(KINDS[form.kind].multiples)
    cpu.call(
        "pack_blocks" if in_super else "pack_blocks32",
        at["codes"], at["scales"], at.get("mins", 0), bad.data_ptr(), rows.data.data_ptr(),
        0 if rows.order is None else rows.order.data_ptr(), len(rows), k, rows.data.stride(0),
        NUMBERS[form.kind] if in_super else FORMS_OF_32[form.name],
    )  # fmt: skip
    if bad.item():
        raise ModelError("a scale or minimum is nan or inf; the file is damaged")


def _round(cpu: Cpu, at: Mapping[str, int], rows: Rows, k: int, form: RoundForm) -> None:
    data = rows.data
    bad, divisors = torch.zeros(1, dtype=torch.int64), torch.tensor(form.divisors, dtype=torch.float32)
    cpu.call(
        "round_pack", at["codes"], at["scales"], bad.data_ptr(), data.data_ptr(),
        0 if rows.order is None else rows.order.data_ptr(), divisors.data_ptr(), len(form.divisors), len(rows), k,
        data.stride(0) * data.itemsize, form.group, form.low, form.high, int(data.dtype is torch.bfloat16), form.bits,
    )  # fmt: skip
    if bad.item():
        raise ModelError(CANNOT_ROUND)
