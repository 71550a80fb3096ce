"""Integer linears through tile registers: the bits of the other units, for every number of rows."""

from __future__ import annotations

import functools

import pytest
import torch

from quire.core.config import DeviceConfig
from quire.ops import cases
from quire.ops.backend import Ops, select
from quire.ops.native import load_native

native = load_native()
pytestmark = pytest.mark.skipif(native is None or "amx" not in native.units(), reason="no tile registers (AMX) here")
ROWS = (1, 11, 12, 15, 16, 17, 33, 64, 65, 150)


@functools.cache
def ops_of(isa: str) -> Ops:
    return select(DeviceConfig(device="cpu", isa=isa, threads=2))


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_integer_linear_has_the_bits_of_the_other_units(kind: str, group: int, zeros: bool) -> None:
    g = torch.Generator().manual_seed(group)
    weight = cases.random_weight(g, kind, 75, 3 * 128, group, zeros)
    x, bias = cases.normal(g, max(ROWS), 3 * 128), cases.normal(g, 75)
    x[:, 3] *= 300.0
    for m in ROWS:
        found = []
        for isa in ("amx", "avx512"):
            ops = ops_of(isa)
            ops.begin_step()
            found.append(ops.linear(x[-m:].contiguous(), ops.pack(weight), bias if m % 2 else None).clone())
        assert torch.equal(*found), m


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
