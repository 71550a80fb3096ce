"""The fused experts against the ops they are made of, for every kind of matrix and however the rows fall to experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from often import one_of
from op_cases import reference as cases
from op_runs import UNITS_HERE, generator, ops_of
from op_runs import pytestmark as pytestmark
from quire.ops.backend import Ops
from quire.ops.cpu.pack_sparse import SPARSE, TWO_OF_FOUR
from quire.ops.experts import Choices, Clamp, ExpertActivation, Grouped, padded_rows
from quire.ops.kinds import KINDS, SUPER_KINDS
from quire.ops.reference.experts import sort_by_expert
from quire.ops.weights import Weight
from quire.quant.base import QWeight

__all__ = ["pytestmark"]
EXPERTS, HIDDEN, F, GROUP = 6, 256, 320, 32
FORMS = [(kind, 8) for kind in ("f32", "bf16", "bf16_f32", "f16", "fp8", *SUPER_KINDS.values())] + [
    (kind, bits) for kind in ("int8", "int4", "table4") for bits in (8, 16)
]


def weights_of(kind: str, bits: int, n: int, k: int) -> list[Weight]:
    """The matrix of each expert; integers have zeros."""
    g = generator(n + bits)
    form = {name: form for form, name in SUPER_KINDS.items()}.get(kind)
    if form is not None:
        return [cases.super_weight(g, form, n, k) for _ in range(EXPERTS)]
    zeros = kind in ("int8", "int4")
    return [cases.random_weight(g, kind, n, k, GROUP, zeros, bits) for _ in range(EXPERTS)]


@contextmanager
def without_zeros(ops: Ops) -> Iterator[None]:
    """Matrices are packed without their zeros, however few they are."""
    kept, ops.cpu.sparse = ops.cpu.sparse, "on"
    yield
    ops.cpu.sparse = kept


def stacked(ops: Ops, matrices: list[Weight], bias: Tensor | None, narrow: bool = False) -> Grouped:
    """The matrices as one buffer."""
    n = matrices[0].shape[0]
    whole = QWeight.cat_rows([QWeight(w.take_rows(padded_rows(n))) for w in matrices]).weight
    packed = ops.pack(whole, narrow)
    return ops.group(packed, EXPERTS, n, bias)


def loads(rows: int) -> list[tuple[str, Tensor]]:
    """Experts of each token: spread, all on one, and with experts of no row, one row and the rest."""
    g = generator(rows)
    spread = torch.stack([torch.randperm(EXPERTS, generator=g)[:2] for _ in range(rows)]).int()
    one = torch.tensor([[3, 1]], dtype=torch.int32).repeat(rows, 1)
    uneven = torch.tensor([[5, 0]], dtype=torch.int32).repeat(rows, 1)
    uneven[0] = torch.tensor([2, 5])
    return [("spread", spread), ("one", one), ("one alone", one[:, :1].contiguous()), ("uneven", uneven)]


def by_hand(ops: Ops, x: Tensor, up: list[Weight], down: list[Weight], biases: tuple[Tensor, Tensor] | None,
            between: ExpertActivation, ids: Tensor, choices: Choices) -> Tensor:  # fmt: skip
    """A `linear` for each expert, over its rows alone."""
    _, places, offsets, weights = choices
    y = torch.empty(ids.numel(), HIDDEN)
    for e in range(EXPERTS):
        begin, end = int(offsets[0, e]), int(offsets[0, e + 1])
        if begin == end:
            continue
        mine = x[choices[0].flatten()[begin:end].long()].contiguous()
        wide = ops.linear(mine, ops.pack(up[e]), biases and biases[0][e].contiguous())
        inner = ops.clamped_swiglu(wide, *between.clamp) if between.clamp else ops.gated_activation(wide, between.kind)
        y[begin:end] = ops.linear(inner, ops.pack(down[e]), biases and biases[1][e].contiguous())
    return ops.combine(y, places, weights)  # type: ignore[no-any-return]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("isa", "kind", "bits"), one_of(3, [(isa, *form) for isa in UNITS_HERE for form in FORMS]))
def test_fused_experts_have_the_bits_of_a_linear_for_each(kind: str, bits: int, isa: str) -> None:
    ops, g = ops_of(isa), generator()
    f = 512 if kind in SUPER_KINDS.values() else F
    up, down = weights_of(kind, bits, 2 * f, HIDDEN), weights_of(kind, bits, HIDDEN, f)
    biases = cases.normal(g, EXPERTS, 2 * f), cases.normal(g, EXPERTS, HIDDEN)
    for given, between in (
        (None, ExpertActivation("silu")),
        (biases, ExpertActivation("gelu")),
        (biases, ExpertActivation("silu", Clamp(1.702, 7.0))),
    ):
        grouped = stacked(ops, up, given and given[0]), stacked(ops, down, given and given[1])
        for rows in (1, 2, 5, 17, 130):
            x = cases.normal(g, rows, HIDDEN)
            for name, ids in loads(rows):
                choices = (*sort_by_expert(ids, EXPERTS), torch.rand(ids.shape, generator=g))
                ops.begin_step()
                expected = by_hand(ops, x, up, down, given, between, ids, choices).clone()
                ops.begin_step()
                assert torch.equal(ops.expert_mlp(x, *grouped, between, choices), expected), (name, rows)
                if given is None and rows == 130:
                    continue
                tokens, places, offsets, weights = choices
                wide = ops.grouped_linear(x, grouped[0], tokens, offsets)
                inner = (
                    ops.clamped_swiglu(wide, *between.clamp)
                    if between.clamp
                    else ops.gated_activation(wide, between.kind)
                )
                assert torch.equal(
                    ops.combine(ops.grouped_linear(inner, grouped[1], None, offsets), places, weights), expected
                )


@pytest.mark.parametrize("isa", UNITS_HERE)
def test_experts_in_12_bits_have_the_bits_of_16(isa: str) -> None:
    ops, g = ops_of(isa), generator()
    ops.cpu.bf16_bits, kept = 12, ops.cpu.bf16_bits
    up, down = weights_of("bf16", 8, 2 * F, HIDDEN), weights_of("bf16", 8, HIDDEN, F)
    narrow = stacked(ops, up, None, True), stacked(ops, down, None, True)
    ops.cpu.bf16_bits = kept
    assert narrow[0].packed.kind == narrow[1].packed.kind == "bf12"
    wide = stacked(ops, up, None), stacked(ops, down, None)
    for rows in (1, 3, 16, 130):
        x = cases.normal(g, rows, HIDDEN)
        for name, ids in loads(rows):
            choices = (*sort_by_expert(ids, EXPERTS), torch.rand(ids.shape, generator=g))
            ops.begin_step()
            found = ops.expert_mlp(x, *narrow, ExpertActivation("silu"), choices)
            if isa != "amx":  # whose tiles sum bf16 in another order than vector registers
                assert torch.equal(found, ops.expert_mlp(x, *wide, ExpertActivation("silu"), choices)), (name, rows)


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("kind", SPARSE)
def test_experts_without_zeros_have_the_bits_of_those_with_them(kind: str, isa: str) -> None:
    ops, g = ops_of(isa), generator()
    up, down = ([_pruned(w) for w in weights_of_plain(kind, *shape)] for shape in ((2 * F, HIDDEN), (HIDDEN, F)))
    dense = stacked(ops, up, None), stacked(ops, down, None)
    with without_zeros(ops):
        sparse = stacked(ops, up, None), stacked(ops, down, None)
        one_by_one = ops.group(ops.pack_stack(up, EXPERTS), EXPERTS, 2 * F, None)
    assert {each.packed.kind for each in (*sparse, one_by_one)} == {SPARSE[kind]}
    for rows in (1, 3, 16, 130):
        x = cases.normal(g, rows, HIDDEN)
        for name, ids in loads(rows):
            choices = (*sort_by_expert(ids, EXPERTS), torch.rand(ids.shape, generator=g))
            ops.begin_step()
            expected = ops.expert_mlp(x, *dense, ExpertActivation("silu"), choices)
            if isa == "amx" and kind == "bf16":  # whose tiles sum bf16 in another order than vector registers
                continue
            assert torch.equal(ops.expert_mlp(x, *sparse, ExpertActivation("silu"), choices), expected), (name, rows)
            assert torch.equal(ops.expert_mlp(x, one_by_one, sparse[1], ExpertActivation("silu"), choices), expected)


def weights_of_plain(kind: str, n: int, k: int) -> list[Weight]:
    """The matrix of each expert, without zeros of groups."""
    g = generator(n)
    return [cases.random_weight(g, kind, n, k, GROUP) for _ in range(EXPERTS)]


def _pruned(weight: Weight) -> Weight:
    """Half of its numbers."""
    noise = torch.rand(weight.shape, generator=generator(weight.shape[0]))
    return replace(weight, codes=torch.where(noise < 0.5, weight.codes, torch.zeros_like(weight.codes)))


def test_every_kind_is_tried() -> None:
    assert {kind for kind, _ in FORMS} | {"bf12", *SPARSE.values(), *TWO_OF_FOUR.values()} == set(KINDS)


@pytest.mark.parametrize("isa", UNITS_HERE)
def test_a_token_of_fused_experts_does_not_depend_on_the_batch(isa: str) -> None:
    ops, g = ops_of(isa), generator()
    grouped = (
        stacked(ops, weights_of("int4", 8, 2 * F, HIDDEN), None),
        stacked(ops, weights_of("int8", 8, HIDDEN, F), None),
    )
    x, (_, ids) = cases.normal(g, 200, HIDDEN), loads(200)[0]
    weights = torch.rand(ids.shape, generator=g)

    def part(rows: slice) -> Tensor:
        ops.begin_step()
        choices = (*sort_by_expert(ids[rows], EXPERTS), weights[rows].contiguous())
        return ops.expert_mlp(x[rows].contiguous(), *grouped, ExpertActivation("silu"), choices).clone()  # type: ignore[no-any-return]

    whole = part(slice(0, 200))
    for m in (1, 4, 9, 60, 128, 129):
        for first in (0, 200 - m):
            assert torch.equal(part(slice(first, first + m)), whole[first : first + m]), (m, first)


@pytest.mark.parametrize("isa", UNITS_HERE)
def test_experts_that_do_not_fit_are_refused(isa: str) -> None:
    ops = ops_of(isa)
    up, down = (
        stacked(ops, weights_of("f32", 8, 2 * F, HIDDEN), None),
        stacked(ops, weights_of("f32", 8, HIDDEN, F), None),
    )
    choices = (*sort_by_expert(torch.tensor([[0, 1]], dtype=torch.int32), EXPERTS), torch.ones(1, 2))
    with pytest.raises(ValueError, match="do not fit"):
        ops.expert_mlp(torch.zeros(1, HIDDEN), down, up, ExpertActivation("silu"), choices)
    tokens, places, offsets, weights = choices
    with pytest.raises(ValueError, match="outside the batch"):
        ops.expert_mlp(
            torch.zeros(1, HIDDEN), up, down, ExpertActivation("silu"), (tokens + 1, places, offsets, weights)
        )
    with pytest.raises(ValueError, match="outside the rows"):
        ops.expert_mlp(
            torch.zeros(1, HIDDEN), up, down, ExpertActivation("silu"), (tokens, places + 1, offsets, weights)
        )


@pytest.mark.parametrize("isa", UNITS_HERE)
def test_a_router_in_bf16_has_the_bits_of_f32(isa: str) -> None:
    ops, g = ops_of(isa), generator()
    for n, k in ((1, 33), (60, 256), (128, 2048), (130, 4100)):
        numbers = cases.normal(g, n, k).bfloat16().float()
        short, wide = ops.pack_exact(numbers), ops.pack(Weight("f32", numbers))
        assert short.kind == "bf16_f32" and 2 * short.nbytes == wide.nbytes
        for rows in (1, 2, 5, 16, 70):
            x = cases.normal(g, rows, k)
            ops.begin_step()
            assert torch.equal(ops.linear(x, short, None), ops.linear(x, wide, None)), (n, k, rows)
    numbers[3, 5] = 1.001
    assert ops.pack_exact(numbers).kind == "f32"
