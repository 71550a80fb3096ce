"""Causal convolutions: as their definition on every unit, and the same bits however rows are cut, beside whom they are
and whether a draft branches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from op_cases import CASES, of_module
from op_cases.convolution import convolution_case
from op_cases.weights import normal
from op_runs import UNITS_HERE, as_int64, close, generator, native, ops_of, random_tree, reference, run
from op_runs import pytestmark as pytestmark
from quire.core.dtypes import BF16, F32, I8, Dtype
from quire.ops.backend import Ops
from quire.ops.convolution import Convolution, RowLayout
from quire.ops.layout import KVCache, PlainLayout
from quire.ops.op import REGISTRY, Case
from quire.ops.reference.caches import allocate

OPS = of_module("convolution")


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("name", OPS)
def test_equals_the_definition(name: str, isa: str) -> None:
    for case in CASES[name](generator()):
        want, got = run(reference(), name, case), run(ops_of(isa), name, case)
        for g, w in zip(got, want, strict=True):
            close(f"{name}/{isa}", g, w, REGISTRY[name].tolerance)


def convolved(ops: Ops, case: Case, tables: Tensor, chunks: list[int], beside: Case | None) -> Tensor:
    """Rows of one sequence from position 0 on, in chunks, each beside the batch `beside` (None: alone)."""
    size, found, done = case["cache"].layout.block_size, [], 0
    for count in chunks:
        at = torch.arange(done, done + count)
        own = case | {
            "x": case["x"][done : done + count].contiguous(),
            "slots": tables[0, at // size].long() * size + at % size,
            "paged": (torch.tensor([0, count]).int(), torch.tensor([done + count]).int(), tables),
        }
        first = 0 if beside is None else len(beside["x"])
        if beside is not None:
            own |= {
                "x": torch.cat((beside["x"], own["x"])),
                "slots": torch.cat((torch.full_like(beside["slots"], -1), own["slots"])),
                "paged": (
                    torch.cat((beside["paged"][0], beside["paged"][0][-1:] + count)),
                    *(torch.cat(parts) for parts in zip(beside["paged"][1:], own["paged"][1:], strict=True)),
                ),
            }
        ops.begin_step()
        found.append(ops.causal_conv(**own)[first:].clone())
        done += count
    return torch.cat(found)


@settings(max_examples=12, deadline=None)
@given(st.data())
@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_no_cut_changes_a_bit(dtype: Dtype, isa: str, data: Any) -> None:
    """A sequence whole, and in any chunks beside other sequences: the same results and the same rows in the cache."""
    ops, g, total = ops_of(isa), generator(3), 70
    size, n = data.draw(st.sampled_from((1, 4, 16))), 40
    conv = Convolution(normal(g, 3, n), gated=True)
    other = convolution_case(g, RowLayout.of(size, n, dtype), conv, ((5, 90), (1, 80)))
    blocks = -(-total // size)
    cache = allocate(RowLayout.of(size, n, dtype), len(other["cache"].keys) + blocks)
    for kind in ("keys", "values"):
        getattr(cache, kind)[blocks:] = getattr(other["cache"], kind)
    *ends, used = other["paged"]
    tables = torch.zeros((1, max(blocks, used.shape[1])), dtype=torch.int32)
    tables[0, :blocks] = torch.arange(blocks).flip(0)
    beside = other | {"paged": (*ends, torch.nn.functional.pad(used + blocks, (0, tables.shape[1] - used.shape[1])))}
    case = {"x": normal(g, total, 3 * n), "cache": cache, "conv": conv}
    whole = convolved(ops, case, tables, [total], None)
    kept = [cache.keys[:blocks].nan_to_num(), cache.values[:blocks].nan_to_num()]
    cache.keys[:blocks], cache.values[:blocks] = torch.nan, torch.nan
    cuts = sorted(data.draw(st.sets(st.integers(1, total - 1), max_size=8)))
    chunks = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
    assert torch.equal(convolved(ops, case, tables, chunks, beside if data.draw(st.booleans()) else None), whole)
    assert torch.equal(cache.keys[:blocks].nan_to_num(), kept[0])
    assert torch.equal(cache.values[:blocks].nan_to_num(), kept[1])


@pytest.mark.parametrize("threads", [1, 3, 5])
def test_threads_change_no_bit(threads: int) -> None:
    g = generator(5)
    conv = Convolution(normal(g, 4, 1040), normal(g, 1040), "silu")
    case = convolution_case(g, RowLayout.of(16, 1040, BF16), conv, ((300, 310), (1, 40), (70, 70)))
    want = run(ops_of("auto"), "causal_conv", case)
    assert native is not None
    native.set_threads(threads)
    try:
        got = run(ops_of("auto"), "causal_conv", case)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(got, want, strict=True))
    finally:
        native.set_threads(2)


@pytest.mark.parametrize("isa", UNITS_HERE)
def test_a_branch_of_a_draft_equals_the_same_tokens_alone(isa: str) -> None:
    ops, g, n = ops_of(isa), generator(7), 48
    conv = Convolution(normal(g, 4, n), gated=True)
    case = convolution_case(g, RowLayout.of(4, n, BF16), conv, ((64, 70), (3, 9), (20, 20)))
    masks = [random_tree(64, 1), [0, 1, 3], [0] * 5 + random_tree(15, 2)]
    case["tree"] = torch.tensor([as_int64(mask) for own in masks for mask in own])
    ops.begin_step()
    whole = ops.causal_conv(**case).clone()
    for s, own in enumerate(masks):
        begin, count = int(case["paged"][0][s]), len(own)
        for row, mask in enumerate(own):
            root = sum(m == 0 for m in own)
            path = [*range(root), *(root + j for j in range(64) if mask >> j & 1)] if mask else [*range(row + 1)]
            alone = {key: value for key, value in case.items() if key != "tree"} | {
                "x": case["x"][[begin + i for i in path]].contiguous(),
                "slots": torch.full((len(path),), -1),
                "paged": (
                    torch.tensor([0, len(path)]).int(),
                    case["paged"][1][s : s + 1] - count + len(path),
                    case["paged"][2][s : s + 1].contiguous(),
                ),
            }
            ops.begin_step()
            assert torch.equal(ops.causal_conv(**alone)[-1], whole[begin + row]), (s, row)


def test_a_replay_equals_the_eager_step_on_new_inputs() -> None:
    ops, g = ops_of("auto"), generator(9)
    conv = Convolution(normal(g, 3, 64), gated=True)
    case = convolution_case(g, RowLayout.of(16, 64, BF16), conv, ((1, 40), (1, 9)))
    case["cache"].keys.zero_()
    case["cache"].values.zero_()
    replay = ops.record(lambda: ops.causal_conv(**case))
    for context in ((40, 9), (33, 1), (17, 8)):
        case["x"].copy_(normal(g, 2, 192))
        case["paged"][1].copy_(torch.tensor(context))
        ops.begin_step()
        want = ops.causal_conv(**case).clone()
        assert torch.equal(replay.run(), want)


@pytest.mark.parametrize(
    ("ends", "lengths", "block", "message"),
    [
        ((0, 2, 9), (40, 5), None, "do not fit the rows"),
        ((0, 3, 2), (40, 5), None, "do not fit the rows"),
        ((0, 2, 3), (1, 5), None, "more rows than tokens"),
        ((0, 2, 3), (400, 5), None, "too short"),
        ((0, 2, 3), (40, 5), 99, "outside the cache"),
    ],
)
def test_sequences_that_do_not_fit_are_refused(
    ends: tuple[int, ...], lengths: tuple[int, ...], block: int | None, message: str
) -> None:
    case = small_case()
    tables = case["paged"][2] if block is None else torch.full((2, 4), block, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        ops_of("auto").causal_conv(**case | {"paged": (torch.tensor(ends).int(), torch.tensor(lengths).int(), tables)})


def small_case() -> Case:
    g = generator()
    conv = Convolution(normal(g, 3, 32), gated=True)
    return convolution_case(g, RowLayout.of(16, 32, F32), conv, ((2, 40), (1, 5)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": torch.tensor([0, 1, 999])}, "outside the cache"),
        ({"x": torch.zeros(3, 100)}, "causal_conv x"),
        ({"conv": Convolution(torch.zeros(3, 30), gated=True)}, "causal_conv x"),
        ({"conv": Convolution(torch.zeros(17, 32), gated=True)}, "17 taps"),
        ({"conv": Convolution(torch.zeros(3, 32), activation="gelu", gated=True)}, "gelu"),
        ({"conv": Convolution(torch.zeros(3, 32), torch.zeros(5), gated=True)}, "bias"),
        ({"cache": allocate(RowLayout.of(16, 32, I8), 6)}, "not kept as"),
        ({"cache": allocate(RowLayout.of(16, 64, F32), 6)}, "rows of 64"),
    ],
)
def test_bad_arguments_are_refused(change: Case, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops_of("auto").causal_conv(**(small_case() | change))


def test_a_cache_of_keys_and_values_is_refused() -> None:
    g = generator()
    case = convolution_case(g, RowLayout.of(16, 32, F32), Convolution(normal(g, 3, 32)), ((2, 40),))
    cache: KVCache = allocate(PlainLayout(16, 1, 16, F32), 6)
    for ops in (reference(), ops_of("auto")):
        with pytest.raises(TypeError, match="cache of rows"):
            ops.causal_conv(**(case | {"cache": cache}))
