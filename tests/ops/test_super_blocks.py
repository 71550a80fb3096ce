"""Weights in super-blocks: the same bits as the same numbers with a float scale a group, and fewer bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gguf_models import random_blocks
from op_cases import reference as cases
from op_runs import UNITS_HERE, generator, native, ops_of
from quire.core.errors import ConfigError
from quire.ops.experts import padded_rows
from quire.ops.weights import PackedTable, Weight
from quire.quant.base import QWeight
from quire.quant.gguf import TYPES, Block
from torch_weights import load_torch

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(native is None, reason="quire._native was not built (no C++ compiler)")
KINDS = {
    "Q2_K": "super2", "Q3_K": "super3", "Q4_K": "super4", "Q5_K": "super5", "Q6_K": "super6", "IQ4_XS": "super_table4",
}  # fmt: skip


def weight_of(name: str, n: int, k: int, seed: int = 0) -> Weight:
    blocks = torch.from_numpy(random_blocks((n, k), gguf.GGMLQuantizationType[name], seed))
    return load_torch(Block(TYPES[name]), {name: blocks}, torch.float32).weight


def widened(weight: Weight) -> Weight:
    return replace(weight, units=None, min_units=None, bits=0)


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("name", KINDS)
def test_they_give_the_bits_of_float_scales_in_any_batch(name: str, isa: str) -> None:
    """768 columns: three super-blocks, of which many rows take two at a time. 75 rows: the last block is not whole."""
    g, ops = generator(), ops_of(isa)
    weight, bias = weight_of(name, 75, 768), cases.normal(g, 75)
    packed, wide = ops.pack(weight), ops.pack(widened(weight))
    assert packed.kind == KINDS[name] and wide.kind in ("int4", "int8", "table4")
    x = cases.normal(g, 512, 768)
    x[:, 3] *= 300.0
    ops.begin_step()
    whole = ops.linear(x, wide, bias).clone()
    for m in (*range(1, 18), 60, 203, 512):
        for first in {0, 1, 512 - m}:
            if first + m > 512:
                continue
            ops.begin_step()
            assert torch.equal(ops.linear(x[first : first + m].contiguous(), packed, bias), whole[first : first + m]), m


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("name", KINDS)
def test_they_are_the_numbers_of_the_file(name: str, isa: str) -> None:
    """Against the definition, with activations that 8 bits hold exactly."""
    g, ops = generator(), ops_of(isa)
    weight = weight_of(name, 33, 512)
    x = torch.randint(-127, 128, (5, 512), generator=g).float()
    x[:, ::16] = 127.0
    ops.begin_step()
    got, wanted = ops.linear(x, ops.pack(weight), None), x.double() @ weight.dequantize().double().t()
    assert (got - wanted).abs().max() <= 2e-6 * (x.abs() @ weight.dequantize().abs().t()).max()


@pytest.mark.parametrize("name", KINDS)
def test_they_take_the_bits_of_the_file(name: str) -> None:
    packed, kind = ops_of("auto").pack(weight_of(name, 64, 1024)), TYPES[name]
    assert packed.nbytes <= 1.05 * 64 * 1024 / kind.numbers * kind.nbytes
    assert packed.nbytes == pytest.approx(64 * 1024 * Block(kind).bits_per_number / 8)


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_rows_of_a_table(name: str, rounded: bool, isa: str) -> None:
    ops, weight = ops_of(isa), weight_of(name, 75, 512)
    tokens = torch.tensor([0, 74, 17, 15, 16, 31, 74], dtype=torch.int32)
    rows = weight.dequantize()[tokens.long()]
    ops.begin_step()
    got = ops.embedding(tokens, PackedTable(ops.pack(weight), rounded))
    assert torch.equal(got, rows.bfloat16().float() if rounded else rows)


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize(
    "names", [("Q4_K", "Q6_K"), ("Q3_K", "Q5_K"), ("IQ4_XS", "Q4_K"), ("Q2_K", "Q3_K"), ("Q4_K", "int4")]
)
def test_gated_mlp_is_linear_activation_linear(names: tuple[str, str], isa: str) -> None:
    g, ops = generator(), ops_of(isa)
    hidden, f = 256, 512
    gate_up = ops.pack(weight_of(names[0], 2 * f, hidden))
    second = weight_of(names[1], hidden, f, 1) if names[1] in KINDS else cases.random_weight(g, "int4", hidden, f, 32)
    down, x = ops.pack(second), cases.normal(g, 230, hidden)
    for rows in (1, 2, 5, 8, 9, 97, 230):
        ops.begin_step()
        part = x[:rows].contiguous()
        inner = ops.gated_activation(ops.linear(part, gate_up, None), "silu")
        assert torch.equal(ops.gated_mlp(part, gate_up, None, down, None, "silu"), ops.linear(inner, down, None)), rows


def test_experts_below_each_other() -> None:
    g, ops = generator(), ops_of("auto")
    parts = [QWeight(weight_of("Q4_K", 40, 256, seed)) for seed in range(3)]
    grouped = ops.group(QWeight.cat_rows([p.take_rows(padded_rows(40)) for p in parts]).pack(ops), 3, 40, None)
    x, offsets = cases.normal(g, 21, 256), torch.tensor([[0, 1, 8, 21]], dtype=torch.int32)
    ops.begin_step()
    got = ops.grouped_linear(x, grouped, None, offsets).clone()
    bounds = offsets[0].tolist()
    for part, first, last in zip(parts, bounds, bounds[1:], strict=False):
        ops.begin_step()
        assert torch.equal(got[first:last], ops.linear(x[first:last].contiguous(), part.pack(ops), None))


def test_what_is_no_whole_super_block_keeps_its_numbers() -> None:
    whole = QWeight(weight_of("Q4_K", 16, 512))
    for start, stop, kind in ((256, 512, "super4"), (128, 512, "int4")):
        part = whole.slice_cols(start, stop)
        assert part.pack(ops_of("auto")).kind == kind
        assert torch.equal(part.dequantize(), whole.dequantize()[:, start:stop])
    mixed = QWeight.cat_rows([whole, QWeight(widened(whole.weight))])
    assert mixed.pack(ops_of("auto")).kind == "int4"
    assert torch.equal(mixed.dequantize(), whole.dequantize().repeat(2, 1))
    assert whole.with_activations(16).pack(ops_of("auto")).kind == "int4"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"codes": torch.full((16, 256), 4, dtype=torch.int8)}, "more bits"),
        ({"units": torch.ones(16, 2).half()}, "its units"),
        ({"units": torch.ones(16, 1)}, "its units"),
    ],
)
def test_refusals(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ops_of("auto").pack(replace(weight_of("Q2_K", 16, 256), **changes))
