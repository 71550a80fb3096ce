"""The table of kinds of packed matrix: ops take and refuse what its rows say, on every unit."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from op_cases import reference as cases
from over_torch import arrays
from quire.ops.backend import Ops
from quire.ops.cpu.layers import fuses_mlp
from quire.ops.cpu.matrix import CpuMatrix, take_apart
from quire.ops.cpu.pack import narrow_bf16
from quire.ops.cpu.pack_sparse import SPARSE, TWO_OF_FOUR, two_of_four
from quire.ops.cpu.state import ACTIVATION_NUMBERS
from quire.ops.kinds import KINDS, NUMBERS, SUPER_KINDS
from quire.ops.weights import Packed
from test_ops import UNITS_HERE, generator, ops_of

HIDDEN, F = 512, 256
EVERY = [(name, isa) for name in KINDS for isa in UNITS_HERE]


def packed_as(ops: Ops, name: str, n: int, k: int, group: int = 0) -> Packed:
    """A random matrix of kind `name`, of its largest group where none is given."""
    form = {kind: form for form, kind in SUPER_KINDS.items()}.get(name)
    if form is not None:
        return ops.pack(cases.super_weight(generator(), form, n, k))
    if name == "bf12":
        found = narrow_bf16(ops.cpu, arrays(cases.random_weight(generator(), "bf16", n, k)))
        assert found is not None
        return found
    if name in SPARSE.values():
        kept, ops.cpu.sparse = ops.cpu.sparse, "on"
        dense = name.removeprefix("sparse_")
        found = ops.pack(cases.random_weight(generator(), dense, n, k, group or max(KINDS[name].groups, default=1)))
        ops.cpu.sparse = kept
        assert found.kind == name
        return found
    if name in TWO_OF_FOUR.values():
        dense = name.removeprefix("sparse24_")
        weight = cases.random_weight(generator(), dense, n, k, group or max(KINDS[name].groups, default=1))
        codes = torch.where(torch.arange(k) % 4 < 2, weight.codes, 0)
        halved = two_of_four(ops.cpu, ops.pack(replace(weight, codes=codes)))
        assert halved is not None
        return halved
    return ops.pack(cases.random_weight(generator(), name, n, k, group or max(KINDS[name].groups, default=1)))


def changed(w: CpuMatrix, **fields: int) -> CpuMatrix:
    """The descriptor with other contents."""
    return CpuMatrix(**{name: getattr(w, name) for name, _ in CpuMatrix._fields_} | fields)


def multiply(ops: Ops, w: CpuMatrix) -> None:
    """A row times the matrix."""
    x, out = cases.normal(generator(), 1, w.k), cases.normal(generator(), 1, w.n)
    ops.cpu.call("linear", out.data_ptr(), x.data_ptr(), w.at, 0, 1)


@pytest.mark.parametrize(("name", "isa"), EVERY)
def test_groups_and_parts_are_those_of_the_row(name: str, isa: str) -> None:
    ops, kind = ops_of(isa), KINDS[name]
    packed = packed_as(ops, name, 48, HIDDEN)
    assert packed.handle.kind == NUMBERS[name] and set(take_apart(packed)[1]) == {"codes", *kind.always}
    for group in (0, 8, 16, 32, 64, 128, 256, 512):
        if group in (kind.groups or (0,)):
            taken = packed_as(ops, name, 48, HIDDEN, group)
            multiply(ops, taken.handle)
        else:
            with pytest.raises(ValueError, match="matrix: its group"):
                multiply(ops, changed(packed.handle, group=group))
    for part in ("codes", *kind.always):
        with pytest.raises(ValueError, match="matrix: "):
            multiply(ops, changed(packed.handle, **{part: 0}))


@pytest.mark.parametrize(("name", "isa"), EVERY)
def test_gated_mlp_takes_the_kinds_that_say_so(name: str, isa: str) -> None:
    ops = ops_of(isa)
    gate_up, down = packed_as(ops, name, 2 * F, HIDDEN), packed_as(ops, name, HIDDEN, F)
    x, out = cases.normal(generator(), 1, HIDDEN), cases.normal(generator(), 1, HIDDEN)
    args = (gate_up.handle.at, 0, down.handle.at, 0, 1, ACTIVATION_NUMBERS["silu"])
    assert fuses_mlp(gate_up, down) == KINDS[name].fuses
    if KINDS[name].fuses:
        ops.cpu.call("gated_mlp", out.data_ptr(), x.data_ptr(), *args)
    else:
        with pytest.raises(ValueError, match="does not fuse"):
            ops.cpu.call("gated_mlp", out.data_ptr(), x.data_ptr(), *args)


def test_without_the_extension_there_are_none_and_blocks_of_files_are_read() -> None:
    code = """
import sys
sys.modules["quire._native"] = None
import numpy as np
from quire.core.dtypes import F32
from quire.ops.kinds import KINDS
from quire.quant.gguf import TYPES, Block
weight = Block(TYPES["Q4_K"]).load({"Q4_K": np.zeros((16, 144), np.uint8)}, F32).weight
assert not KINDS and weight.shape == (16, 256) and weight.units is not None
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
