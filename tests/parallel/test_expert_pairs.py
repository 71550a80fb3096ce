"""Who holds which expert, who computes which pair, and how outputs find the rows that they are of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from model_variants import SKEWED
from op_cases.moe import random_choices
from op_cases.weights import random_weight
from oracle import BACKENDS, backend
from over_torch import over_torch
from quire.ops.experts import ExpertActivation
from quire.parallel.experts import place_experts
from quire.parallel.pairs import PairDivider, row_parts

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("redundant", [0, 1, 3, 8])
def test_every_expert_has_a_home_and_every_rank_as_many(world: int, redundant: int) -> None:
    redundant = min(redundant, 8 * (world - 1))
    for counts in ((0,) * 8, SKEWED, tuple(reversed(SKEWED)), (0, 0, 0, 0, 0, 0, 0, 9)):
        held = place_experts(counts, world, redundant)
        assert sorted({e for own in held for e in own}) == list(range(8))
        assert all(len(set(own)) == len(own) and list(own) == sorted(own) for own in held)
        sizes = [len(own) for own in held]
        assert sum(sizes) == 8 + redundant and max(sizes) - min(sizes) <= 1


def test_what_is_used_most_is_held_twice_and_work_is_even() -> None:
    assert place_experts((0,) * 8, 2, 0) == ((0, 1, 2, 3), (4, 5, 6, 7))

    def load(held: tuple[tuple[int, ...], ...]) -> float:
        """Of the rank with most, over the mean: pairs of experts that several hold go where least is to do."""
        alone = [sum(SKEWED[e] for e in own if sum(e in other for other in held) == 1) for own in held]
        mean = sum(SKEWED) / len(held)
        return max(*alone, mean) / mean

    plain, placed, copied = place_experts((0,) * 8, 2, 0), place_experts(SKEWED, 2, 0), place_experts(SKEWED, 2, 2)
    assert all(0 in own and 2 in own for own in copied)
    assert load(plain) > 1.5 and load(placed) < 1.05 and load(copied) == 1.0


def tables(held: tuple[tuple[int, ...], ...], experts: int, idle: int = 0) -> list[PairDivider]:
    """What each rank has."""
    return [PairDivider(held, r, np.zeros(experts + len(held) + 1, np.int64), idle) for r in range(len(held))]


@pytest.mark.parametrize("rows", [1, 2, 7, 100])
@pytest.mark.parametrize(("world", "redundant"), [(2, 0), (2, 3), (3, 2), (5, 9)])
def test_pairs_come_once_and_outputs_find_their_rows(rows: int, world: int, redundant: int) -> None:
    """Rows travel as `all_to_all` would carry them: each choice of a row is where `places` says, once."""
    ops, g = backend("reference"), torch.Generator().manual_seed(rows)
    ids = torch.stack([torch.randperm(8, generator=g)[:3] for _ in range(rows)]).int()
    held, parts = place_experts(SKEWED, world, redundant), row_parts(rows, world)
    dividers = tables(held, 8)
    found = [divide(ops, ids) for divide in dividers]
    mail: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for rank, pairs in enumerate(found):
        offsets, used = pairs.offsets[0].tolist(), int(pairs.offsets[0, -1])
        expert_of = [e for e, a, b in zip(held[rank], offsets[:-1], offsets[1:], strict=True) for _ in range(a, b)]
        sent = [(int(pairs.tokens[i]), expert_of[i]) for i in pairs.order[:used, 0].tolist()]
        assert int(pairs.sends.sum()) == used == len(set(sent)) and max(sent, default=(0, 0))[0] < rows
        for to, part in enumerate(torch.arange(used).split(pairs.sends.tolist())):
            mail[to] += [sent[i] for i in part.tolist()]
    first = 0
    for rank, pairs in enumerate(found):
        want = [[(first + r, int(e)) for e in ids[first + r]] for r in range(parts[rank])]
        assert [[mail[rank][i] for i in row] for row in pairs.places.tolist()] == want
        first += parts[rank]
    counted = dividers[0].counted.tolist()
    assert counted[:8] == torch.bincount(ids.flatten().long(), minlength=8).tolist()
    assert counted[8 : 8 + world] == [int(p.offsets[0, -1]) for p in found] and counted[-1] == max(counted[8:-1])
    assert all(divide.counted.tolist() == counted for divide in dividers)


def test_choices_behind_the_experts_are_nobodys() -> None:
    """What is received of the others lies where it would without them, in the order of the choices."""
    ops, rows, g = backend("reference"), 9, torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(8, generator=g)[:4] for _ in range(rows)]).int()
    held, parts, first = ((0, 2), (1, 3)), row_parts(rows, 2), 0
    found = [divide(ops, ids) for divide in tables(held, 4, idle=4)]
    assert sum(int(pairs.offsets[0, -1]) for pairs in found) == int((ids < 4).sum())
    for rank, pairs in enumerate(found):
        own = ids[first : first + parts[rank]]
        assert pairs.places[own >= 4].tolist() == [0] * int((own >= 4).sum())
        order = [e % 2 for e in own[own < 4].tolist()]  # who holds it
        want = [order[:i].count(r) + (order.count(0) if r else 0) for i, r in enumerate(order)]
        assert pairs.places[own < 4].tolist() == want
        first += parts[rank]
    with pytest.raises(ValueError, match="there is no such expert"):
        tables(held, 4, idle=4)[0](ops, torch.tensor([[8]], dtype=torch.int32))


def test_an_expert_is_read_by_a_second_rank_only_for_many_pairs() -> None:
    ops, everywhere = backend("reference"), ((0, 1), (0, 1))
    for rows, shares in ((1, {1}), (16, {16}), (32, {16}), (100, {48, 52})):
        loads = {int(d(ops, torch.zeros(rows, 1, dtype=torch.int32)).offsets[0, -1]) for d in tables(everywhere, 2)}
        assert loads - {0} == shares


def test_what_cannot_be_divided_is_refused() -> None:
    ops, divide = backend("cpu"), tables(((0, 1), (2,)), 3)[0]
    for ids in (torch.tensor([[3]]), torch.tensor([[-1]])):
        with pytest.raises(ValueError, match="there is no such expert"):
            divide(ops, ids.int())
    with pytest.raises(ValueError, match="expert 1 is held by no rank"):
        tables(((0,), (2,)), 3)


@pytest.mark.parametrize("used", [0, 1, 40, 300])
def test_experts_compute_as_many_pairs_as_there_are(used: int) -> None:
    """Fewer than there is room for; the others are not looked at."""
    ops, g = over_torch(backend("cpu")), torch.Generator().manual_seed(used)
    gate_up, down = (
        ops.group(ops.pack(random_weight(g, "bf16", 4 * n, k, 0)), 4, n, None) for n, k in ((64, 32), (48, 32))
    )
    x = torch.randn(350, 32, generator=g)
    tokens, places, offsets, weights = random_choices(g, 350, 1, 4)
    row_of = torch.empty(350, dtype=torch.int64)
    row_of[places[:, 0].long()] = torch.arange(350)
    want = ops.expert_mlp(x, gate_up, down, ExpertActivation("silu"), (tokens, places, offsets, weights))[
        row_of[:used]
    ].clone()

    def room(part: Tensor) -> Tensor:
        return torch.cat((part, torch.full((350 - used, 1), 9999, dtype=part.dtype)))

    some = (
        room(tokens[:used]),
        room(torch.arange(used).int()[:, None]),
        offsets.clamp(max=used),
        room(weights[row_of[:used]]),
    )
    assert torch.equal(ops.expert_mlp(x, gate_up, down, ExpertActivation("silu"), some)[:used], want)
