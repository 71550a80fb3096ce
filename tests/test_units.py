"""What instruction-set units promise each other: integer products have the same bits on all that have vectors."""

from __future__ import annotations

import pytest
import torch

from quire.ops import cases
from test_ops import UNITS_HERE, generator, ops_of, run

VECTOR_UNITS = [unit for unit in UNITS_HERE if unit != "portable"]


@pytest.mark.skipif(len(VECTOR_UNITS) < 2, reason="needs two vector units")
def test_integer_kernels_are_equal_on_all_vector_units() -> None:
    for case in cases.linear_cases(generator(3)):
        if case["w"].kind not in ("f32", "bf16"):
            # fp8 is widened to bf16, which tile registers add in an order of their own
            units = [isa for isa in VECTOR_UNITS if isa != "amx" or case["w"].kind != "fp8"]
            first, *others = (run(ops_of(isa), "linear", case)[0] for isa in units)
            assert all(torch.equal(first, other) for other in others)


@pytest.mark.skipif(not {"avx2", "avx512vnni"} <= set(UNITS_HERE), reason="needs AVX2 and AVX-512 with VNNI")
def test_bf16_in_two_multiply_adds_is_equal_on_both_widths() -> None:
    for case in cases.linear_cases(generator(4)):
        if case["w"].kind == "bf16":
            narrow, wide = (run(ops_of(isa), "linear", case)[0] for isa in ("avx2", "avx512vnni"))
            assert torch.equal(narrow, wide)
