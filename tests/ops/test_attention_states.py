"""Attention whose splits lie in several caches: their states, folded, have the bits of one cache."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from op_cases import CASES
from op_cases.states import states_case
from op_runs import close, copied, run
from over_torch import select
from quire.cache.groups import Lanes
from quire.core.config import DeviceConfig
from quire.core.dtypes import BF16, F8, F16, F32, I8
from quire.core.parallel import SPLIT
from quire.core.windows import first_seen
from quire.ops.backend import Ops
from quire.ops.layout import KVLayout
from quire.ops.native import load_native
from quire.ops.op import REGISTRY, Case

native = load_native()
UNITS_HERE: list[str] = native.units() if native else []
needs_native = pytest.mark.skipif(native is None, reason="quire._native was not built (no C++ compiler)")
ROWS = ((1, 1), (9, 700), (1, 2600), (0, 40), (40, 1060), (1, 513))
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a window": {"window": 600},
    "a short window": {"window": 20},
    "chunks": {"window": -600},
    "short chunks": {"window": -20},
    "sinks": {"extras": "sinks"},
    "slopes": {"extras": "alibi"},
    "all": {"extras": "softcap sinks alibi bias", "window": 900},
}


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def ops_of(isa: str) -> Ops:
    return select(
        DeviceConfig(device="reference") if isa == "reference" else DeviceConfig(isa=isa, threads=2, device="cpu")
    )


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def spread(case: Case, window: int, lanes: int) -> tuple[list[Case], Tensor, Tensor]:
    """What each of `lanes` holders is asked, and where a row's states lie beside each other, ascending by split."""
    tables, size = case["block_tables"], case["cache"].layout.block_size
    of = Lanes(lanes, size)
    ends = [
        end
        for s in range(len(case["context"]))
        for end in range(
            int(case["context"][s]) - int(case["cu_q"][s + 1] - case["cu_q"][s]) + 1, int(case["context"][s]) + 1
        )
    ]
    seen = [range(first_seen(window, end - 1) // SPLIT, -(-end // SPLIT)) for end in ends]
    owner = [[of.of(split * SPLIT // size) for split in row] for row in seen]
    parts, first, places = [], 0, [[0] * len(row) for row in seen]
    for lane in range(lanes):
        counts = torch.tensor([0, *(row.count(lane) for row in owner)]).cumsum(0)
        away = torch.tensor([of.of(i) != lane for i in range(tables.shape[1])])
        parts.append(case | {"block_tables": torch.where(away, -1, tables).int(), "starts": counts})
        for t, row in enumerate(owner):
            for nth, i in enumerate(i for i, each in enumerate(row) if each == lane):
                places[t][i] = first + int(counts[t]) + nth
        first += int(counts[-1])
    starts = torch.tensor([0, *map(len, seen)]).cumsum(0)
    return parts, starts, torch.tensor([place for row in places for place in row])


def folded(ops: Ops, case: Case, lanes: int) -> Tensor:
    spec, layout = case["spec"], case["cache"].layout
    parts, starts, order = spread({k: v for k, v in case.items() if k != "starts"}, spec.window, lanes)
    states = []
    for part in parts:
        ops.begin_step()
        states.append(ops.attention_states(**copied(part)).clone())
    heads = case["qkv"].shape[1] // layout.head_dim - 2 * layout.kv_heads
    ops.begin_step()
    return ops.fold_states(torch.cat(states), starts, order, heads, spec.sinks).clone()


def whole(ops: Ops, case: Case) -> Tensor:
    return run(ops, "attention", {k: v for k, v in case.items() if k != "starts"})[0]


@needs_native
@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("form", FORMS)
def test_splits_of_several_caches_give_the_bits_of_one(form: str, isa: str) -> None:
    ops = ops_of(isa)
    layouts = [KVLayout(16, 2, 32, BF16), KVLayout(16, 1, 24, F32)]
    if form in ("plain", "all"):
        layouts += [KVLayout(size, 2, 40, dtype) for size, dtype in (
            (1, BF16), (64, I8), (32, F8), (8, F16))]  # fmt: skip
    for layout in layouts:
        case = states_case(generator(), layout, 4 * layout.kv_heads, ROWS, **FORMS[form])
        want = whole(ops, case)
        for lanes in (1, 2, 3):
            assert torch.equal(folded(ops, case, lanes), want), (layout, lanes)


@needs_native
@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("name", ["fold_states", "cache_rows"])
def test_equals_the_reference(name: str, isa: str) -> None:
    definition = REGISTRY[name]
    for case in CASES[name](generator()):
        for found, want in zip(run(ops_of(isa), name, case), run(ops_of("reference"), name, case), strict=True):
            close(name, found, want, definition.tolerance)


@pytest.mark.parametrize("form", FORMS)
def test_the_definitions_of_both_parts_are_that_of_the_whole(form: str) -> None:
    case = states_case(generator(), KVLayout(16, 2, 24, F32), 4, ROWS[:3], **FORMS[form])
    close(form, folded(ops_of("reference"), case, 2), whole(ops_of("reference"), case), 2e-5)


@needs_native
def test_what_is_asked_wrongly_is_refused() -> None:
    ops, layout = ops_of(UNITS_HERE[0]), KVLayout(16, 1, 32, F32)
    good = states_case(generator(), layout, 1, ((1, 1100),), lanes=2)
    bad_count = good | {"starts": good["starts"] + torch.tensor([0, 1])}
    torn = good["block_tables"].clone()
    torn[0, 3] = -1
    for case, why in ((bad_count, "has not as many states"), (good | {"block_tables": torn}, "is held elsewhere")):
        ops.begin_step()
        with pytest.raises(ValueError, match=why):
            ops.attention_states(**case)
    plain = {k: v for k, v in good.items() if k != "starts"}
    with pytest.raises(ValueError, match="outside the cache"):
        ops.attention(**plain)
    for name, more in (("starts", [0, 0]), ("order", [7])):
        case = {
            "states": torch.zeros(2, 34),
            "starts": torch.tensor([0, 1]),
            "order": torch.tensor([0]),
            "heads": 1,
            "sinks": None,
        }
        with pytest.raises(ValueError, match=r"no states|no such state"):
            ops.fold_states(**(case | {name: torch.tensor(more)}))


@pytest.mark.parametrize(("count", "size"), [(1, 16), (2, 16), (3, 64), (2, 128)])
def test_lanes_count_their_blocks(count: int, size: int) -> None:
    lanes = Lanes(count, size)
    for blocks in (0, 1, 31, 32, 33, 70, 200):
        held = [lanes.of(i) for i in range(blocks)]
        assert lanes.spread(blocks) == [held.count(lane) for lane in range(count)]
        around = [[lanes.of(i) for i in range(first, first + blocks)] for first in range(130)]
        assert lanes.fullest(blocks) == max(max(map(each.count, range(count))) for each in around)
