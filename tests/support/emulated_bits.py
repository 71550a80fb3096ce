"""Integer products of emulated units have the bits of this machine's (run by test_emulated.py with its plugin)."""

from __future__ import annotations

import pytest
import torch

from emulated import this_machine
from op_cases import reference as cases
from op_runs import UNITS_HERE, generator, ops_of, run
from over_torch import select
from quire.core.config import DeviceConfig
from quire.ops.backend import Ops


def twin_of(isa: str) -> Ops:
    """This machine's unit that promises the same bits: the portable one, or the best, which is all that it builds."""
    with this_machine():
        return select(DeviceConfig(device="cpu", isa="portable" if isa == "portable" else "auto", threads=2))


@pytest.mark.parametrize("isa", UNITS_HERE)
def test_integer_kernels_have_the_bits_of_this_machine(isa: str) -> None:
    twin, compared = twin_of(isa), 0
    floats = {"f32", "bf16"} | ({"fp8"} if isa == "amx" else set())  # tile registers add bf16 in an order of their own
    for seed in (3, 4):
        for case in cases.linear_cases(generator(seed)):
            if case["w"].kind not in floats:
                here, there = (run(ops, "linear", case)[0] for ops in (twin, ops_of(isa)))
                assert torch.equal(here, there), (case["w"].kind, case["x"].shape)
                compared += 1
    assert compared > 20
