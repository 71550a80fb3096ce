"""Fused ops against the ops they are made of: the same arithmetic, so the same bits."""

from __future__ import annotations

import pytest
import torch

from quire.ops import cases
from test_ops import UNITS_HERE, generator, ops_of

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
