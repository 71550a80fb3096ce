"""Integer linears through tile registers: the bits of the other units, for every number of rows."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from op_cases import reference as cases
from over_torch import select
from quire.core.config import DeviceConfig
from quire.ops.backend import Ops
from quire.ops.kinds import SUPER_KINDS
from quire.ops.native import load_native
from quire.ops.weights import SUPER, Weight

native = load_native()
pytestmark = pytest.mark.skipif(
    native is None or not {"amx", "avx512"} <= set(native.units()),
    reason="no tile registers (AMX) here, or a build without the unit they are compared with (QUIRE_UNITS=all)",
)
ROWS = (1, 11, 12, 15, 16, 17, 33, 64, 65, 150)


@functools.cache
def ops_of(isa: str) -> Ops:
    return select(DeviceConfig(device="cpu", isa=isa, threads=2))


def same_bits(weight: Weight, x: Tensor, bias: Tensor | None) -> None:
    """Every number of rows of `x` has the bits of the unit without tile registers."""
    for m in ROWS:
        found = []
        for isa in ("amx", "avx512"):
            ops = ops_of(isa)
            ops.begin_step()
            found.append(ops.linear(x[-m:].contiguous(), ops.pack(weight), bias if m % 2 else None).clone())
        assert torch.equal(*found), m


def activations(g: torch.Generator, k: int) -> Tensor:
    x = cases.normal(g, max(ROWS), k)
    x[:, 3] *= 300.0
    return x


@pytest.mark.parametrize("beside", ["", "zeros", "minimums"])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_integer_linear_has_the_bits_of_the_other_units(kind: str, bits: int, group: int, beside: str) -> None:
    """`bits` of the activations: 16 are two digits."""
    g = torch.Generator().manual_seed(group)
    weight = cases.random_weight(g, kind, 75, 3 * 128, group, beside == "zeros", bits)
    if beside == "minimums":
        assert weight.scales is not None
        least = (-7 * weight.scales.float() * torch.rand(weight.scales.shape, generator=g)).half()
        weight = replace(weight, codes=weight.codes + (8 if kind == "int4" else 0), mins=least)
    same_bits(weight, activations(g, 3 * 128), cases.normal(g, 75))


@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("digits", [1, 2])
def test_a_table_has_the_bits_of_the_other_units(digits: int, bits: int, group: int) -> None:
    """`digits` of the table's numbers, `bits` of the activations."""
    g = torch.Generator().manual_seed(group)
    weight = cases.random_weight(g, "table4", 75, 3 * 128, group, bits=bits)
    weight = replace(weight, table=torch.tensor(cases.TABLES[digits], dtype=torch.int16))
    same_bits(weight, activations(g, 3 * 128), cases.normal(g, 75))


@pytest.mark.parametrize("form", SUPER_KINDS, ids=SUPER_KINDS.values())
def test_super_blocks_have_the_bits_of_the_other_units(form: tuple[int, int, bool, bool]) -> None:
    g = torch.Generator().manual_seed(form[0])
    same_bits(cases.super_weight(g, form, 139, 3 * SUPER), activations(g, 3 * SUPER), cases.normal(g, 139))


def test_nan_and_extreme_rows_have_the_bits_of_the_other_units() -> None:
    g = torch.Generator().manual_seed(0)
    for kind in ("int8", "int4"):
        weight = cases.random_weight(g, kind, 64, 256, 32)
        x = cases.normal(g, 20, 256)
        x[3, 5], x[4], x[5], x[6, 9] = float("nan"), 0.0, 3e30, float("inf")
        outs = []
        for isa in ("amx", "avx512"):
            ops = ops_of(isa)
            ops.begin_step()
            outs.append(ops.linear(x, ops.pack(weight), None).view(torch.int32).clone())
        assert torch.equal(*outs)
        assert outs[0].view(torch.float32)[3].isnan().any()


def test_long_and_wide_matrices_in_several_panels() -> None:
    g = torch.Generator().manual_seed(1)
    weight = cases.random_weight(g, "int4", 16 * 9, 8192, 128)
    x = cases.normal(g, 180, 8192)
    outs = []
    for isa in ("amx", "avx512"):
        ops = ops_of(isa)
        ops.begin_step()
        outs.append(ops.linear(x, ops.pack(weight), None).clone())
    assert torch.equal(*outs)
