"""The ops of a mixture of experts on every instruction set: definitions, batches, replays."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from op_cases import CASES, of_module
from op_cases import reference as cases
from op_cases.moe import plain_grouped
from op_runs import UNITS_HERE, close, copied, generator, ops_of, reference, tensors
from op_runs import pytestmark as pytestmark
from quire.ops.backend import Ops
from quire.ops.experts import Grouped, Routing
from quire.ops.op import REGISTRY

__all__ = ["pytestmark"]
OPS = of_module("moe")


def on(ops: Ops, value: object) -> object:
    """`value` as this backend takes it: experts packed, tensors copied."""
    if isinstance(value, Grouped):
        assert value.packed.plain is not None
        return ops.group(ops.pack(value.packed.plain), value.experts, value.n, value.bias)
    return copied(value)


def run(ops: Ops, name: str, case: dict[str, object]) -> list[Tensor]:
    ops.begin_step()
    args = {k: on(ops, v) for k, v in case.items()}
    out = getattr(ops, name)(**args)
    return [t.float().clone() for t in tensors([out, [v for v in args.values() if not isinstance(v, Grouped)]])]


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("name", OPS)
def test_equals_the_reference(name: str, isa: str) -> None:
    definition = REGISTRY[name]
    for case in CASES[name](generator()):
        for found, expected in zip(run(ops_of(isa), name, case), run(reference(), name, case), strict=True):
            close(f"{name}/{isa}", found, expected, definition.tolerance)


def test_the_cases_cover_every_op() -> None:
    assert set(OPS) == {
        "route",
        "route_by_token",
        "scale_choices",
        "sort_by_expert",
        "grouped_linear",
        "expert_mlp",
        "combine",
        "clamped_swiglu",
        "scale_by_sigmoid",
        "scale_by_softplus",
    }


def mixture(ops: Ops, x: Tensor, logits: Tensor, w: Grouped, routing: Routing) -> Tensor:
    ids, weights = ops.route(logits, None, routing)
    tokens, places, offsets = ops.sort_by_expert(ids, routing.experts)
    return ops.combine(ops.grouped_linear(x, w, tokens, offsets), places, weights)


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("kind", ["f32", "bf16", "int8", "int4"])
def test_a_token_does_not_depend_on_the_batch(kind: str, isa: str) -> None:
    g, ops, routing = generator(), ops_of(isa), Routing(6, 2, renormalize=True)
    w = on(ops, plain_grouped(g, kind, 6, 40, 256, 64, True))
    assert isinstance(w, Grouped)
    x, logits = cases.normal(g, 120, 256), cases.normal(g, 120, 6)
    ops.begin_step()
    whole = mixture(ops, x, logits, w, routing).clone()
    for m in (1, 2, 7, 33, 119):
        for first in (0, 120 - m):
            ops.begin_step()
            rows = slice(first, first + m)
            part = mixture(ops, x[rows].contiguous(), logits[rows].contiguous(), w, routing)
            assert torch.equal(part, whole[rows]), (m, first)


@pytest.mark.parametrize("isa", UNITS_HERE)
def test_a_recording_routes_anew(isa: str) -> None:
    g, ops, routing = generator(), ops_of(isa), Routing(5, 2)
    w = on(ops, plain_grouped(g, "int8", 5, 16, 64, 32, False))
    assert isinstance(w, Grouped)
    x, logits = cases.normal(g, 3, 64), cases.normal(g, 3, 5)
    # A replay needs every op native; those of `ops_of` are.
    replay = ops.record(lambda: mixture(ops, x, logits, w, routing))
    for _ in range(4):
        x.copy_(cases.normal(g, 3, 64))
        logits.copy_(cases.normal(g, 3, 5))
        found = replay.run().clone()
        ops.begin_step()
        assert torch.equal(found, mixture(ops, x, logits, w, routing))


@pytest.mark.parametrize("isa", UNITS_HERE)
def test_lies_are_refused(isa: str) -> None:
    ops = ops_of(isa)
    ids = torch.tensor([[0, 7]], dtype=torch.int32)
    with pytest.raises(ValueError, match="no such expert"):
        ops.sort_by_expert(ids, 4)
    w = on(ops, plain_grouped(generator(), "f32", 2, 8, 8, 0, False))
    x, offsets = torch.zeros(1, 8), torch.tensor([[0, 1, 2]], dtype=torch.int32)
    with pytest.raises(ValueError, match="outside the batch"):
        ops.grouped_linear(x, w, ids, offsets)
    with pytest.raises(ValueError, match="ascend"):
        ops.grouped_linear(x, w, ids % 1, torch.tensor([[0, 3, 2]], dtype=torch.int32))
    with pytest.raises(ValueError, match="cannot be chosen"):
        ops.route(torch.zeros(1, 4), None, Routing(4, 3, groups=4, top_groups=2))


def test_rows_that_are_not_the_experts_are_refused() -> None:
    packed = reference().pack(cases.random_weight(generator(), "f32", 40, 8))
    with pytest.raises(ValueError, match="40 rows"):
        reference().group(packed, 4, 10, None)


@pytest.mark.parametrize("isa", ["reference", *UNITS_HERE])
@pytest.mark.parametrize("groups", [1, 2])
def test_scores_that_are_all_zero_weigh_nothing(isa: str, groups: int) -> None:
    """Sigmoids of -200 are 0 in f32. transformers adds 1e-20 to the sum, too, which no ordinary sum shows."""
    ops = reference() if isa == "reference" else ops_of(isa)
    routing = Routing(8, 3, "sigmoid", renormalize=True, scale=2.5, groups=groups, top_groups=1, group_best=2)
    ops.begin_step()
    ids, weights = ops.route(torch.full((2, 8), -200.0), None, routing)
    assert ids.tolist() == [[0, 1, 2]] * 2 and weights.tolist() == [[0.0] * 3] * 2
