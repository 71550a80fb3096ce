"""bf16 weights in 12 bits: the same numbers, hence the same bits in every op that reads them, on every unit."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from op_cases import reference as cases
from over_torch import select
from quire import LLM, SamplingParams
from quire.core.config import DeviceConfig
from quire.core.errors import ConfigError
from quire.ops.backend import Ops
from quire.ops.cpu.matrix import take_apart
from quire.ops.native import load_native
from quire.ops.weights import PackedTable, Weight

native = load_native()
UNITS = [unit for unit in native.units() if unit != "amx"] if native else []
"""Tile registers add bf16 in an order of their own, and 12 bits have no tiles."""
SHAPES = [(16, 8), (33, 264), (70, 1032), (48, 520)]
"""Less than a block, ends of chunks and blocks that are not full."""
ROWS = (1, 2, 4, 7, 16, 17, 40)


@functools.cache
def ops_of(isa: str) -> Ops:
    try:
        return select(DeviceConfig(device="cpu", isa=isa, bf16_bits=12))
    except ConfigError as error:
        pytest.skip(str(error))


def weight_of(n: int, k: int, seed: int = 0) -> Weight:
    """Numbers as in a trained matrix, and some that are far from all others: tiny, huge, zero, infinite."""
    numbers = cases.normal(torch.Generator().manual_seed(seed), n, k) * 0.02
    numbers.view(-1)[:: max(5, n * k // 7)] *= 1e-9
    numbers[0, 0], numbers[n - 1, k - 1], numbers[n // 2, k // 2], numbers[n // 3, k // 3] = 0.0, -0.0, 1e30, -torch.inf
    return Weight("bf16", numbers.bfloat16())


def rows_of(ops: Ops, weight: Weight) -> Tensor:
    """The matrix as the kernels hold it."""
    packed = ops.pack(weight, narrow=True)
    assert packed.kind == "bf12"
    tokens = torch.arange(packed.n, dtype=torch.int32)
    return ops.embedding(tokens, PackedTable(packed, rounded=True))


@pytest.mark.parametrize("isa", UNITS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear_has_the_bits_of_16(isa: str, n: int, k: int) -> None:
    ops, weight = ops_of(isa), weight_of(n, k)
    wide, narrow = ops.pack(weight), ops.pack(weight, narrow=True)
    assert (wide.kind, narrow.kind) == ("bf16", "bf12")
    g = torch.Generator().manual_seed(1)
    for m in ROWS:
        x, bias = cases.normal(g, m, k), cases.normal(g, n)
        ops.begin_step()
        expected, found = ops.linear(x, wide, bias), ops.linear(x, narrow, bias)
        assert torch.equal(expected.view(torch.int32), found.view(torch.int32)), m


@pytest.mark.parametrize("isa", UNITS)
def test_gated_mlp_has_the_bits_of_16(isa: str) -> None:
    ops, hidden, inner = ops_of(isa), 264, 304
    g = torch.Generator().manual_seed(2)
    weights = [cases.random_weight(g, "bf16", 2 * inner, hidden, 32), cases.random_weight(g, "bf16", hidden, inner, 32)]
    for m in (1, 3, 9, 40):
        x = cases.normal(g, m, hidden)
        ops.begin_step()
        up, down = ([ops.pack(w, narrow=narrow) for narrow in (False, True)] for w in weights)
        assert ops.fuses_mlp(up[1], down[1])
        pairs = ((0, 0), (1, 1), (0, 1), (1, 0))
        expected, *found = [ops.gated_mlp(x, up[i], None, down[j], None, "silu") for i, j in pairs]
        assert all(torch.equal(expected, y) for y in found), m


@pytest.mark.parametrize("isa", UNITS)
def test_every_number_comes_back(isa: str) -> None:
    for n, k in SHAPES:
        weight = weight_of(n, k)
        found = rows_of(ops_of(isa), weight)
        assert torch.equal(found.bfloat16().view(torch.int16), weight.codes.view(torch.int16))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 70), st.integers(0, 2**31), st.integers(1, 15))
def test_any_matrix_fits_or_stays_as_it_is(n: int, eights: int, seed: int, odd: int) -> None:
    ops, g = ops_of("portable"), torch.Generator().manual_seed(seed)
    numbers = (cases.normal(g, n, 8 * eights) * 0.02).bfloat16()
    flat = numbers.view(torch.int16).view(-1)
    places = torch.randint(len(flat), (odd,), generator=g)
    flat[places] = torch.randint(-(2**15), 2**15, (odd,), generator=g).to(torch.int16)
    weight = Weight("bf16", numbers)
    packed = ops.pack(weight, narrow=True)
    if packed.kind == "bf12":
        found = ops.embedding(torch.arange(n, dtype=torch.int32), PackedTable(packed, rounded=False))
        same = found.view(torch.int32) == numbers.float().view(torch.int32)
        assert bool((same | numbers.float().isnan()).all())


def test_matrices_with_many_exponents_or_odd_columns_stay_in_16() -> None:
    ops, g = ops_of("portable"), torch.Generator().manual_seed(3)
    wild = torch.randint(-(2**15), 2**15, (32, 256), generator=g).to(torch.int16).view(torch.bfloat16)
    for numbers in (wild, cases.normal(g, 32, 36).bfloat16()):
        assert ops.pack(Weight("bf16", numbers), narrow=True).kind == "bf16"
    plain = select(DeviceConfig(device="cpu", isa="portable"))
    assert plain.pack(weight_of(16, 8), narrow=True).kind == "bf16"


def test_a_quarter_is_saved_and_parts_can_be_taken_apart() -> None:
    ops, weight = ops_of("portable"), cases.random_weight(torch.Generator(), "bf16", 256, 1024, 32)
    wide, narrow = ops.pack(weight), ops.pack(weight, narrow=True)
    assert narrow.nbytes < 0.76 * wide.nbytes
    assert {name: t.size for name, t in take_apart(narrow)[1].items()} == {"codes": narrow.nbytes, "table": 32}


def test_a_model_says_the_same_and_is_kept_packed(tmp_path: Path) -> None:
    prompts, params = ["import os", "def main("], SamplingParams(max_tokens=8, temperature=0.0)
    options = {"dtype": "bfloat16", "device": "cpu", "isa": "portable"}  # tiles (AMX) sum in an order of their own
    texts = []
    for bits in (16, 12, 12):
        llm = LLM(bf16_bits=bits, cache_packed=str(tmp_path / "packed"), **options)
        texts.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
        llm.close()
    assert texts[0] == texts[1] == texts[2]
    assert len(list((tmp_path / "packed").iterdir())) == 2


def test_other_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match="--bf16-bits 8 must be 12 or 16"):
        LLM(bf16_bits=8)
