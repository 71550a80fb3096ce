"""Weights of codes in all their forms: rows that do not depend on the batch, refusals, and how exact they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from op_cases import reference as cases
from op_runs import UNITS_HERE, generator, native, ops_of, reference, run
from quire.core.errors import ConfigError
from quire.ops.cpu.pack import table_digits
from quire.ops.weights import Weight

pytestmark = pytest.mark.skipif(native is None, reason="quire._native was not built (no C++ compiler)")
PAIR = torch.tensor(cases.TABLES[2], dtype=torch.int16)


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("kind", ["int4", "int4 zeros", "int4 mins", "int8", "int8 zeros", "table4", "pair"])
def test_a_row_does_not_depend_on_the_batch(kind: str, bits: int, isa: str) -> None:
    """1,104 columns: few rows become codes in pieces, the last of which is not whole."""
    g, ops = generator(), ops_of(isa)
    name, _, extra = kind.replace("pair", "table4").partition(" ")
    weight = cases.random_weight(g, name, 75, 1104, 16, zeros=extra == "zeros", bits=bits)
    if extra == "mins":
        assert weight.scales is not None
        weight = replace(weight, codes=weight.codes + 8, mins=-7 * weight.scales)
    weight = replace(weight, table=PAIR) if kind == "pair" else weight
    w, x = ops.pack(weight), cases.normal(g, 60, 1104)
    ops.begin_step()
    whole = ops.linear(x, w, None).clone()
    for m in (1, 2, 3, 4, 5, 6, 7, 8, 9, 17):
        for first in (0, 1, 60 - m):
            ops.begin_step()
            assert torch.equal(ops.linear(x[first : first + m].contiguous(), w, None), whole[first : first + m])


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("group", [32, 256])
def test_a_row_does_not_depend_on_the_batch_of_float8_weights(group: int, isa: str) -> None:
    g, ops = generator(), ops_of(isa)
    w, x, bias = ops.pack(cases.random_weight(g, "fp8", 75, 512, group)), cases.normal(g, 300, 512), cases.normal(g, 75)
    ops.begin_step()
    whole = ops.linear(x, w, bias).clone()
    for m in (1, 2, 3, 5, 8, 15, 16, 17, 33, 64, 257, 299):  # around the tiles of every unit, and two panels
        for first in {0, 1, 300 - m}:
            ops.begin_step()
            part = ops.linear(x[first : first + m].contiguous(), w, bias)
            assert torch.equal(part, whole[first : first + m]), (m, first)


@pytest.mark.parametrize("isa", UNITS_HERE)
def test_every_float8_number_is_widened_exactly(isa: str) -> None:
    """Row 0 of x picks a column each: with a power of two as scale the output is the number itself."""
    finite = torch.tensor([c for c in range(256) if c & 127 != 127], dtype=torch.uint8)
    codes = torch.stack([finite.roll(i) for i in range(0, 254, 8)], 1).contiguous().view(torch.float8_e4m3fn)
    weight = Weight("fp8", codes, torch.full((254, 1), 0.25), group=32, activation_bits=16)
    for x in (torch.eye(32), torch.eye(32)[5:6].contiguous()):
        (found,) = run(ops_of(isa), "linear", {"x": x, "w": weight, "bias": None})[:1]
        assert torch.equal(found, x @ weight.dequantize().t())


def test_float8_weights_that_cannot_be_packed() -> None:
    w = cases.random_weight(generator(), "fp8", 16, 64, 32)
    nan = w.codes.view(torch.uint8).clone()
    nan[3, 5] = 255
    assert w.scales is not None
    for changes, message in (
        ({"codes": nan.view(torch.float8_e4m3fn)}, "a weight is nan"),
        ({"activation_bits": 8}, "need a GPU"),
        ({"scales": w.scales.half()}, "must be float32"),
        ({"group": 16, "scales": torch.ones(16, 4)}, "group of 16 is not one of"),
    ):
        with pytest.raises(ConfigError, match=message):
            ops_of(UNITS_HERE[0]).pack(replace(w, **changes))


@pytest.mark.parametrize("kind", ["int4", "int8", "table4"])
def test_sixteen_bits_are_nearly_exact(kind: str) -> None:
    """Against float64: 8 bits of a normal group of 32 lose about 0.5 %, 16 bits 256 times less."""
    g, x = generator(), cases.normal(generator(1), 5, 512)
    for bits, low, high in ((8, 1e-3, 2e-2), (16, 1e-7, 1e-4)):
        weight = cases.random_weight(g, kind, 64, 512, bits=bits)
        want = x.double() @ weight.dequantize().double().t()
        found = run(ops_of(UNITS_HERE[0]), "linear", {"x": x, "w": weight, "bias": None})[0]
        assert low < float((found - want).norm() / want.norm()) < high


def test_tiny_activations_vanish_and_zero_stays_zero() -> None:
    for bits in (8, 16):
        weight = cases.random_weight(generator(), "int4", 16, 32, bits=bits)
        for value in (0.0, 1e-37, 1e-42):
            case = {"x": torch.full((1, 32), value), "w": weight, "bias": None}
            for ops in (reference(), *map(ops_of, UNITS_HERE)):
                assert bool((run(ops, "linear", case)[0].abs() < 1e-30).all())


def test_digits_of_a_table_make_its_numbers() -> None:
    bytes_of = table_digits(PAIR.numpy()).astype(np.int64) - 128
    assert np.array_equal(bytes_of[:16] * 255 + bytes_of[16:], PAIR.numpy())
    assert np.abs(bytes_of).max() <= 127
    assert len(table_digits(np.arange(-8, 8, dtype=np.int16))) == 16


BASE = cases.random_weight(generator(), "table4", 16, 32)
INT4 = cases.random_weight(generator(), "int4", 16, 32)
REFUSED: list[tuple[Weight, dict[str, Any], str]] = [
    (BASE, {"table": None}, "needs a table"),
    (BASE, {"table": torch.full((16,), 32513, dtype=torch.int16)}, "at most 32512"),
    (BASE, {"table": torch.zeros(8, dtype=torch.int16)}, "16 numbers"),
    (BASE, {"mins": torch.zeros(16, 1).half()}, "neither zeros nor minimums"),
    (BASE, {"codes": BASE.codes - 1}, "outside 0..15"),
    (INT4, {"mins": torch.zeros(16, 1).half()}, "outside 0..15"),
    (INT4, {"mins": torch.zeros(16, 1)}, "minimums are float32"),
    (INT4, {"mins": torch.zeros(16, 2).half()}, "scales' shape"),
    (INT4, {"order": torch.zeros(32, dtype=torch.int32)}, "permutation of 32"),
    (INT4, {"order": torch.arange(32)}, "permutation of 32"),
    (INT4, {"activation_bits": 4}, "activations of 4 bits"),
    (INT4, {"group": 8}, "group of 8"),
]  # fmt: skip


@pytest.mark.parametrize(("weight", "change", "message"), REFUSED)
def test_weights_that_cannot_be_packed(weight: Weight, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ops_of(UNITS_HERE[0]).pack(replace(weight, **change))
