"""Matrices without their zeros: the bits of the dense kind in every op that reads them, on every unit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from op_cases import reference as cases
from over_torch import arrays, select
from quire import LLM, SamplingParams
from quire.core.config import DeviceConfig, flat_config
from quire.core.errors import ConfigError
from quire.ops.backend import Ops
from quire.ops.cpu.matrix import CpuMatrix, take_apart
from quire.ops.cpu.pack import pack_dense
from quire.ops.cpu.pack_sparse import LEAST_ZEROS, SPARSE, TWO_OF_FOUR, holds_blocks, two_of_four, without_zeros
from quire.ops.kinds import KINDS
from quire.ops.native import load_native
from quire.ops.weights import Packed, PackedTable, Weight

native = load_native()
UNITS = native.units() if native else []
ROWS = (*range(1, 18), 40, 130, 512)
SHAPES = [(16, 128), (70, 384), (33, 1152)]
"""A block, blocks that are not full, and more columns than are expanded at a time."""
FIELDS = [field[0] for field in CpuMatrix._fields_]
MODELS: list[dict[str, Any]] = [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}]
MASKS: list[Any] = ["2:4", 0.0, 0.5, 0.9, 1.0]


@functools.cache
def ops_of(isa: str, sparse: str = "on") -> Ops:
    try:
        return select(DeviceConfig(device="cpu", isa=isa, sparse=sparse))
    except ConfigError as error:
        pytest.skip(str(error))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pruned(weight: Weight, mask: str | float, seed: int = 1) -> Weight:
    """`weight` with zeros: two of each four columns, or a share; one row is without zeros, one of nothing else."""
    n, k = weight.shape
    noise = torch.rand(n, k, generator=generator(seed))
    if mask == "2:4":
        kept = noise.view(n, k // 4, 4).argsort(-1).argsort(-1).view(n, k) < 2
    else:
        assert isinstance(mask, float)
        kept = noise >= mask
    kept[n // 3], kept[n // 2] = True, False
    return replace(weight, codes=torch.where(kept, weight.codes, torch.zeros_like(weight.codes)))


def both(ops: Ops, weight: Weight) -> tuple[Packed, Packed]:
    """The weight packed with its zeros and without."""
    dense, sparse = pack_dense(ops.cpu, arrays(weight)), ops.pack(weight)
    assert sparse.kind == SPARSE[dense.kind] == f"sparse_{weight.kind}"
    return dense, sparse


def same(isa: str, kind: str) -> bool:
    """Whether dense and sparse kind add up in one order: tile registers add bf16 in their own, only dense."""
    return not (isa == "amx" and kind == "bf16")


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def check_products(ops: Ops, isa: str, kind: str, pack: Callable[[Weight], tuple[Packed, Packed]]) -> None:
    """Dense and sparse packing have the same products, whatever the shape, the group and the number of rows."""
    for n, k in SHAPES:
        for group in (32, 64, 128) if kind != "bf16" else (0,):
            dense, sparse = pack(cases.random_weight(generator(n), kind, n, k, group or 32))
            for m in ROWS if (n, group) in ((70, 32), (70, 0)) else (1, 3, 9, 40):
                x, bias = cases.normal(generator(m), m, k), cases.normal(generator(m), n)
                ops.begin_step()
                expected, found = ops.linear(x, dense, bias), ops.linear(x, sparse, bias)
                if same(isa, kind):
                    assert torch.equal(bits(expected), bits(found)), (n, k, group, m)
                else:
                    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("isa", UNITS)
@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("mask", MASKS)
def test_linear_has_the_bits_of_the_dense_kind(kind: str, mask: str | float, isa: str) -> None:
    ops = ops_of(isa)
    check_products(ops, isa, kind, lambda weight: both(ops, pruned(weight, mask)))


@pytest.mark.parametrize("isa", UNITS)
@pytest.mark.parametrize("kind", SPARSE)
def test_rows_have_the_bits_they_have_alone(kind: str, isa: str) -> None:
    ops = ops_of(isa)
    _, sparse = both(ops, pruned(cases.random_weight(generator(), kind, 70, 384, 32), 0.5))
    x = cases.normal(generator(3), 512, 384)
    whole = ops.linear(x, sparse, None).clone()
    for m in ROWS:
        ops.begin_step()
        assert torch.equal(bits(ops.linear(x[:m].contiguous(), sparse, None)), bits(whole[:m])), m


@pytest.mark.parametrize("isa", UNITS)
@pytest.mark.parametrize("kind", SPARSE)
def test_an_order_of_columns_and_wide_scales(kind: str, isa: str) -> None:
    if kind == "bf16":
        return
    ops, order = ops_of(isa), torch.randperm(256, generator=generator()).int()
    weight = pruned(cases.random_weight(generator(), kind, 48, 256, 64), 0.5)
    assert weight.scales is not None
    dense, sparse = both(ops, replace(weight, order=order, scales=weight.scales.float()))
    for m in (1, 5, 20):
        x = cases.normal(generator(m), m, 256)
        ops.begin_step()
        assert torch.equal(bits(ops.linear(x, dense, None)), bits(ops.linear(x, sparse, None)))


@pytest.mark.parametrize("isa", UNITS)
@pytest.mark.parametrize("kind", SPARSE)
def test_gated_mlp_has_the_bits_of_the_dense_kind(kind: str, isa: str) -> None:
    ops, hidden, inner = ops_of(isa), 256, 320
    up = both(ops, pruned(cases.random_weight(generator(), kind, 2 * inner, hidden, 32), "2:4"))
    down = both(ops, pruned(cases.random_weight(generator(1), kind, hidden, inner, 32), 0.6))
    for m in (1, 3, 9, 17, 200):
        x = cases.normal(generator(m), m, hidden)
        ops.begin_step()
        assert ops.fuses_mlp(up[1], down[1])
        expected, *found = [
            ops.gated_mlp(x, up[i], None, down[j], None, "silu") for i, j in ((0, 0), (1, 1), (0, 1), (1, 0))
        ]
        if same(isa, kind):
            assert all(torch.equal(bits(expected), bits(y)) for y in found), m


@pytest.mark.parametrize("isa", UNITS)
@pytest.mark.parametrize("kind", SPARSE)
def test_every_number_comes_back(kind: str, isa: str) -> None:
    ops = ops_of(isa)
    for n, k in SHAPES:
        weight = pruned(cases.random_weight(generator(n), kind, n, k, 32), 0.5)
        _, sparse = both(ops, weight)
        found = ops.embedding(torch.arange(n, dtype=torch.int32), PackedTable(sparse, rounded=False))
        assert torch.equal(bits(found), bits(weight.dequantize()))


def test_minus_zero_is_a_zero_and_what_is_not_finite_a_number() -> None:
    ops, weight = ops_of("portable"), pruned(cases.random_weight(generator(), "bf16", 32, 64), 0.5)
    numbers = weight.codes.clone()
    numbers[0, :3] = torch.tensor([-0.0, torch.inf, torch.nan]).bfloat16()
    _, sparse = both(ops, Weight("bf16", numbers))
    found = ops.embedding(torch.arange(32, dtype=torch.int32), PackedTable(sparse, rounded=False))
    assert torch.equal(bits(found), bits(torch.where(numbers == 0, torch.zeros_like(numbers), numbers).float()))
    x = cases.normal(generator(), 3, 64)
    x[0, :8], x[1] = 0.0, -0.0
    numbers[0, 1:3], numbers[1:16] = 0.0, -0.0
    dense, sparse = both(ops, Weight("bf16", numbers))
    assert torch.equal(bits(ops.linear(x, dense, None)), bits(ops.linear(x, sparse, None)))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(SPARSE)), st.integers(1, 40), st.integers(1, 4), st.integers(0, 2**31), st.floats(0, 1))
def test_any_matrix_is_what_its_definition_says(kind: str, n: int, chunks: int, seed: int, share: float) -> None:
    """The bytes, read by hand: bits of 512 numbers of 16 rows by 32 columns, then the numbers."""
    ops, k = ops_of("portable"), 32 * chunks
    weight = pruned(cases.random_weight(generator(seed), kind, n, k, 32), share, seed)
    dense, sparse = both(ops, weight)
    assert holds_blocks(ops.cpu, sparse)
    codes, step = take_apart(sparse)[1]["codes"], sparse.handle.code_step
    for block in range(-(-n // 16)):
        at = block * step
        for chunk in range(chunks):
            chosen = [bool(codes[at + i // 8] >> (i % 8) & 1) for i in range(512)]
            at += 64
            numbers = iter(_numbers(kind, codes[at:].tolist(), chosen))
            for place, taken in enumerate(chosen):
                row, column = _place(kind, place)
                row, column = block * 16 + row, chunk * 32 + column
                value = next(numbers) if taken else 0
                if row < n:
                    assert value == (weight.codes.view(torch.int16) if kind == "bf16" else weight.codes)[row, column]
            at += _bytes(kind, chosen)
    assert sparse.nbytes <= dense.nbytes + codes.size


def _place(kind: str, place: int) -> tuple[int, int]:
    """Row and column of a chunk's number in the dense layout."""
    if kind == "bf16":
        return place % 32 // 2, place // 32 * 2 + place % 2
    if kind == "int8":
        return place % 64 // 4, place // 64 * 4 + place % 4
    return place % 64 // 4, place // 128 * 8 + place % 128 // 64 * 4 + place % 4


def _numbers(kind: str, data: list[int], chosen: list[bool]) -> list[int]:
    if kind == "bf16":
        return [int.from_bytes(bytes(data[2 * i : 2 * i + 2]), "little", signed=True) for i in range(sum(chosen))]
    if kind == "int8":
        return [value - 256 * (value > 127) for value in data[: sum(chosen)]]
    found, at = list[int](), 0
    for part in range(0, 8, 2):
        counts = [sum(chosen[64 * p : 64 * p + 64]) for p in (part, part + 1)]
        for half, count in enumerate(counts):
            found += [(value >> 4 * half & 15) - 16 * (value >> 4 * half & 8 > 0) for value in data[at : at + count]]
        at += max(counts)
    return found


def _bytes(kind: str, chosen: list[bool]) -> int:
    if kind != "int4":
        return sum(chosen) * (2 if kind == "bf16" else 1)
    counts = [sum(chosen[64 * part : 64 * part + 64]) for part in range(8)]
    return sum(max(counts[part : part + 2]) for part in range(0, 8, 2))


def test_half_of_the_numbers_take_what_was_predicted() -> None:
    """Bytes a weight, 2:4: the kept half and an eighth of a byte for the bits; up to 3 % for the longest block."""
    ops = ops_of("portable")
    for kind, dense_bytes, expected in (("bf16", 2.0, 1.125), ("int8", 1.0, 0.625), ("int4", 0.5, 0.375)):
        n, k = 256, 2048
        weight = cases.random_weight(generator(), kind, n, k, 128)
        codes = torch.where(weight.codes == 0, torch.ones_like(weight.codes), weight.codes)
        kept = torch.rand(n, k // 4, 4, generator=generator(1)).argsort(-1).argsort(-1).view(n, k) < 2
        dense, sparse = both(ops, replace(weight, codes=codes * kept))
        sizes = [take_apart(packed)[1]["codes"].size / (n * k) for packed in (dense, sparse)]
        assert sizes[0] == dense_bytes and expected <= sizes[1] < 1.03 * expected, (kind, sizes)


def test_auto_takes_what_has_enough_zeros_where_the_processor_expands() -> None:
    ops = ops_of("auto", "auto")
    for kind, least in LEAST_ZEROS.items():
        weight = cases.random_weight(generator(), kind, 64, 256, 32)
        codes = torch.where(weight.codes == 0, torch.ones_like(weight.codes), weight.codes)
        for share, expected in ((least - 0.03, kind), (least + 0.03, SPARSE[kind])):
            kept = torch.rand(64, 256, generator=generator(1)) >= share
            found = ops.pack(replace(weight, codes=codes * kept))
            assert found.kind == (expected if ops.cpu.native.module.expands() else kind), (kind, share)
    few = pruned(cases.random_weight(generator(), "int4", 64, 256, 32), "2:4")
    assert ops.pack(few).kind == "int4" and ops_of("auto").pack(few).kind == "sparse_int4"
    assert ops_of("auto", "off").pack(Weight("bf16", torch.zeros(16, 64).bfloat16())).kind == "bf16"


def test_what_it_cannot_hold_stays_as_it_is() -> None:
    ops, g = ops_of("portable"), generator()
    for weight in (
        cases.random_weight(g, "bf16", 32, 48),
        cases.random_weight(g, "int8", 32, 64, 16),
        cases.random_weight(g, "int8", 32, 64, 32, zeros=True),
        cases.random_weight(g, "int4", 32, 64, 32, bits=16),
        cases.random_weight(g, "table4", 32, 64, 32),
        cases.random_weight(g, "f32", 32, 64),
    ):
        assert ops.pack(weight).kind == weight.kind
    assert without_zeros(ops.cpu, both(ops, cases.random_weight(g, "bf16", 16, 64))[1]).kind == "sparse_bf16"


def test_bits_that_point_past_a_block_are_noticed() -> None:
    ops = ops_of("portable")
    _, sparse = both(ops, pruned(cases.random_weight(generator(), "int8", 64, 256, 32), 0.5))
    codes = take_apart(sparse)[1]["codes"]
    assert holds_blocks(ops.cpu, sparse)
    codes[sparse.handle.code_step : sparse.handle.code_step + 64] = 255
    assert not holds_blocks(ops.cpu, sparse)


@pytest.mark.parametrize("options", MODELS, ids=str)
def test_a_model_says_the_same_and_is_kept_packed(options: dict[str, Any], tmp_path: Path) -> None:
    prompts, params = ["import os", "def main("], SamplingParams(max_tokens=8, temperature=0.0)
    isa = next(unit for unit in UNITS if unit != "amx")  # tiles sum bf16 in an order of their own
    texts = []
    for sparse in ("off", "on", "on"):
        llm = LLM(device="cpu", isa=isa, sparse=sparse, cache_packed=str(tmp_path / "packed"), **options)
        texts.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
        llm.close()
    assert texts[0] == texts[1] == texts[2]
    assert sorted("sparse-on" in file.name for file in (tmp_path / "packed").iterdir()) == [False, True]


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match="sparse"):
        flat_config(sparse="sometimes")


def test_descriptors_of_too_few_columns_are_refused() -> None:
    ops = ops_of("portable")
    assert set(SPARSE.values()) <= set(KINDS)
    _, sparse = both(ops, cases.random_weight(generator(), "bf16", 16, 64))
    w = CpuMatrix(**{name: getattr(sparse.handle, name) for name in FIELDS} | {"k": 48})
    x, out = torch.zeros(1, 48), torch.zeros(1, 16)
    with pytest.raises(ValueError, match="columns"):
        ops.cpu.call("linear", out.data_ptr(), x.data_ptr(), w.at, 0, 1)


def halved(ops: Ops, weight: Weight, fewer: bool = True) -> tuple[Packed, Packed]:
    """The weight with two of each four columns at random, in some rows fewer, dense and as its kind of 2:4."""
    n, k = weight.shape
    kept = torch.rand(n, k // 4, 4, generator=generator(7)).argsort(-1).argsort(-1).view(n, k) < 2
    if fewer:
        kept &= (torch.arange(n) % 3 > 0)[:, None] | (torch.rand(n, k, generator=generator(8)) < 0.5)
    zeroed = replace(weight, codes=torch.where(kept, weight.codes, torch.zeros_like(weight.codes)))
    dense = pack_dense(ops.cpu, arrays(zeroed))
    found = two_of_four(ops.cpu, dense)
    assert found is not None and found.kind == TWO_OF_FOUR[dense.kind]
    return dense, found


@pytest.mark.parametrize("isa", UNITS)
@pytest.mark.parametrize("kind", TWO_OF_FOUR)
def test_two_of_four_have_the_bits_of_the_dense_kind(kind: str, isa: str) -> None:
    ops = ops_of(isa)
    check_products(ops, isa, kind, lambda weight: halved(ops, weight))


@pytest.mark.parametrize("isa", UNITS)
@pytest.mark.parametrize("kind", TWO_OF_FOUR)
def test_two_of_four_in_a_gated_mlp_and_as_a_table(kind: str, isa: str) -> None:
    ops, hidden, inner = ops_of(isa), 256, 320
    up = halved(ops, cases.random_weight(generator(), kind, 2 * inner, hidden, 32))
    down = halved(ops, cases.random_weight(generator(1), kind, hidden, inner, 32))
    for m in (1, 3, 9, 17, 200) if same(isa, kind) else ():
        x = cases.normal(generator(m), m, hidden)
        ops.begin_step()
        expected, found = (ops.gated_mlp(x, up[i], None, down[i], None, "silu") for i in (0, 1))
        assert torch.equal(bits(expected), bits(found)), m
    ids = torch.arange(hidden, dtype=torch.int32)
    expected, found = (ops.embedding(ids, PackedTable(w, rounded=False)) for w in down)
    assert torch.equal(bits(expected), bits(found))


def test_two_of_four_take_a_half_and_two_bits_each() -> None:
    """Bytes a weight, and that three of four are refused."""
    ops = ops_of("portable")
    for kind, expected in (("bf16", 1.125), ("int8", 0.625), ("int4", 0.375)):
        weight = cases.random_weight(generator(), kind, 64, 256, 128)
        dense, sparse = halved(ops, weight, fewer=False)
        assert take_apart(sparse)[1]["codes"].size == 64 * 256 * expected
        codes = torch.where(torch.arange(256) % 4 < 3, torch.ones_like(weight.codes), torch.zeros_like(weight.codes))
        assert two_of_four(ops.cpu, pack_dense(ops.cpu, arrays(replace(weight, codes=codes)))) is None
        assert dense.nbytes > sparse.nbytes
