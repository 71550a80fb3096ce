"""Fused ops against the ops they are made of: the same arithmetic, so the same bits."""

from __future__ import annotations

import pytest
import torch

from op_cases import reference as cases
from op_runs import UNITS_HERE, generator, ops_of
from quire.core.dtypes import BF16
from quire.ops.layout import KVLayout

KINDS = ("f32", "bf16", "int8", "int4")


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_gated_mlp_is_linear_activation_linear_bit_for_bit(first: str, second: str, isa: str) -> None:
    g, ops = generator(), ops_of(isa)
    hidden, f = 192, 320
    gate_up = ops.pack(cases.random_weight(g, first, 2 * f, hidden, 64, zeros=True))
    down = ops.pack(cases.random_weight(g, second, hidden, f, 32))
    biases = cases.normal(g, 2 * f), cases.normal(g, hidden)
    x = cases.normal(g, 150, hidden)
    for rows in (1, 3, 7, 12, 64, 150):
        for bias, down_bias in (biases, (None, None)):
            ops.begin_step()
            part = x[:rows].contiguous()
            inner = ops.gated_activation(ops.linear(part, gate_up, bias), "silu")
            expected = ops.linear(inner, down, down_bias)
            assert torch.equal(ops.gated_mlp(part, gate_up, bias, down, down_bias, "silu"), expected), rows


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize(
    "kinds", [("f32", "f32"), ("bf16", "bf16"), ("int8", "int8"), ("int4", "bf16"), ("bf16", "int4")]
)
def test_plain_mlp_is_linear_activation_linear_bit_for_bit(kinds: tuple[str, str], isa: str) -> None:
    g, ops = generator(), ops_of(isa)
    hidden, f = 192, 320
    up = ops.pack(cases.random_weight(g, kinds[0], f, hidden, 64, zeros=True))
    down = ops.pack(cases.random_weight(g, kinds[1], hidden, f, 32))
    biases = cases.normal(g, f), cases.normal(g, hidden)
    x = cases.normal(g, 400, hidden)
    for rows in (1, 3, 12, 64, 150, 400):
        for bias, down_bias in (biases, (None, None)):
            ops.begin_step()
            part = x[:rows].contiguous()
            expected = ops.linear(ops.activation(ops.linear(part, up, bias), "gelu_tanh"), down, down_bias)
            assert torch.equal(ops.plain_mlp(part, up, bias, down, down_bias, "gelu_tanh"), expected), rows


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128])
def test_sixteen_tokens_of_a_block_are_stored_as_each_alone(head_dim: int, isa: str) -> None:
    g, ops = generator(), ops_of(isa)
    layout = KVLayout(32, 2, head_dim, BF16)
    qkv, count = cases.normal(g, 70, 8 * head_dim), 70
    table = cases.normal(g, count, 2, head_dim // 2)
    positions, slots = torch.arange(count).int(), torch.arange(count) + 8
    slots[40] = -1
    together, alone = (ops.allocate_cache(layout, 3) for _ in range(2))
    for cache in (together, alone):
        cache.keys.zero_()
        cache.values.zero_()
    found = ops.rope_and_cache(qkv.clone(), positions, table, slots, together, None, 1e-5)
    rows = [
        ops.rope_and_cache(qkv[i : i + 1].clone(), positions[i : i + 1], table, slots[i : i + 1], alone, None, 1e-5)
        for i in range(count)
    ]
    assert torch.equal(found, torch.cat(rows))
    assert torch.equal(together.keys, alone.keys) and torch.equal(together.values, alone.values)


@pytest.mark.parametrize("isa", UNITS_HERE)
def test_some_columns_of_a_matrix_are_placed(isa: str) -> None:
    g, ops = generator(), ops_of(isa)
    x, out = cases.normal(g, 50, 96), cases.normal(g, 60, 40)
    expected = out.clone()
    expected[:50, 5:37] = x[:, 3:35]
    assert torch.equal(ops.place_columns(out, x[:, 3:35], 5), expected)
    with pytest.raises(ValueError, match="place_columns x: need rows"):
        ops.place_columns(out, x.t()[:40], 0)


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("head_dim", [64, 72])
def test_a_row_that_sees_all_has_the_same_bits_whoever_is_asked_with_it(head_dim: int, isa: str) -> None:
    g, ops = generator(), ops_of(isa)
    case = cases.attention_case(g, KVLayout(128, 2, head_dim, BF16), 2, ((1, 1100),))
    q, scale = cases.normal(g, 1, 700, 2 * head_dim), case["spec"].scale
    seen = case["cache"], case["context"], case["block_tables"], scale
    together = ops.whole_attention(q, *seen).clone()
    for first, count in ((0, 1), (3, 16), (500, 37), (699, 1)):
        ops.begin_step()
        part = q[:, first : first + count].contiguous()
        assert torch.equal(ops.whole_attention(part, *seen), together[first : first + count]), first
