"""Matrices packed right out of what their file holds: each byte is read once and each packed one written once."""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.core.errors import ModelError
from quire.ops.arena import huge_bytes
from quire.ops.cpu import Cpu
from quire.ops.matrix import GROWING, LANES, Numbers, assemble, part_sizes, table_digits
from quire.ops.weights import SUPER_KINDS, Packed, Stored

FORMS = {kind: number for number, kind in enumerate(SUPER_KINDS.values())}
"""Kind in super-blocks -> its number in csrc/super_blocks.h."""


def pack_stored(cpu: Cpu, stored: Stored) -> Packed:
    """`stored` packed for the native `linear`; `ModelError` when a scale is nan or inf."""
    (n, k), form = stored.shape, stored.form
    if any(len(part) % LANES for part in stored.parts[:-1]):  # 16 rows go into one block
        stored = replace(stored, parts=(stored.whole,))
    sizes = part_sizes(form.kind, (n, k), form.group, False)
    out = {name: huge_bytes(cpu.native, size[0]) for name, size in sizes.items() if name in GROWING}
    bad, blocks, done = torch.zeros(1, dtype=torch.int64), -(-n // LANES), 0
    for part in stored.parts:
        rows = part if part.stride(1) == 1 else part.contiguous()
        at = {name: t.data_ptr() + done // LANES * (t.numel() // blocks) for name, t in out.items()}
        cpu.call(
            "pack_blocks", at["codes"], at["scales"], at.get("mins", 0), bad.data_ptr(), rows.data_ptr(), len(rows), k,
            rows.stride(0), FORMS[form.kind],
        )  # fmt: skip
        if bad.item():
            raise ModelError("a scale or minimum is nan or inf; the file is damaged")
        done += len(rows)
    shared = {"table": table_digits(torch.tensor(form.table))} if form.table else {}
    return assemble(form.kind, (n, k), form.group, Numbers(), out | shared)
