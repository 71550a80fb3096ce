"""Ops of entries, rows of a cache that stand for some tokens each, on every instruction set."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from op_cases import CASES
from op_cases.entries import ROWS, choosing_case, dtypes
from op_runs import UNITS_HERE, close, generator, ops_of, reference, run
from quire.core.dtypes import F32
from quire.ops.entries import EntryLayout
from quire.ops.op import Case


@pytest.mark.parametrize("name", ["pool_entries", "entry_attention"])
@pytest.mark.parametrize("isa", UNITS_HERE)
def test_entries_and_what_reads_them_equal_the_reference(isa: str, name: str) -> None:
    for case in CASES[name](generator()):
        exact = case["entries" if name == "pool_entries" else "cache"].layout.dtype == F32
        found, expected = (run(ops, name, case) for ops in (ops_of(isa), reference()))
        for got, want in zip(found, expected, strict=True):
            close(isa, got, want, 2e-5 if exact else 2e-2)


@pytest.mark.parametrize("isa", UNITS_HERE)
def test_chosen_entries_equal_the_reference(isa: str) -> None:
    for dtype in dtypes():
        for size, every, heads, d, most in (
            (16, 4, 4, 16, 3),
            (1, 4, 33, 24, 8),
            (16, 32, 1, 128, 2),
            (4, 4, 8, 8, 64),
        ):
            case = choosing_case(generator(), EntryLayout.of_tokens(size, d, dtype, every), heads, most)
            found, want = (run(ops, "choose_tokens", case)[0] for ops in (ops_of(isa), reference()))
            assert torch.equal(found, want), (size, every)


def alone(case: Case, s: int, first: int, last: int) -> Case:
    """Rows first..last of sequence `s` of a case of `entry_attention`, in a batch of their own."""
    cu_q, context, tables = case["paged"]
    at = slice(int(cu_q[s]) + first, int(cu_q[s]) + last)
    chosen, new = case["reads"].chosen, int(cu_q[s + 1] - cu_q[s])
    context = context[s : s + 1] - (new - last)
    paged = torch.tensor([0, last - first], dtype=torch.int32), context, tables[s : s + 1].contiguous()
    reads = replace(case["reads"], chosen=None if chosen is None else chosen[at].contiguous())
    return case | {"q": case["q"][at].contiguous(), "paged": paged, "tables": case["tables"][s : s + 1].contiguous(),
                   "reads": reads}  # fmt: skip


@pytest.mark.parametrize("isa", UNITS_HERE)
def test_a_row_does_not_depend_on_the_batch(isa: str) -> None:
    for case in CASES["entry_attention"](generator()):
        whole, cu_q = run(ops_of(isa), "entry_attention", case)[0], case["paged"][0]
        for s, first, last in ((1, 0, 1), (4, 0, 17), (4, 3, 8), (4, 16, 17), (5, 0, 1)):
            found = run(ops_of(isa), "entry_attention", alone(case, s, first, last))[0]
            assert torch.equal(found, whole[int(cu_q[s]) + first : int(cu_q[s]) + last])


@pytest.mark.parametrize("isa", UNITS_HERE)
def test_entries_do_not_depend_on_how_a_sequence_is_cut(isa: str) -> None:
    s, ops = 4, ops_of(isa)
    new, context = ROWS[s]
    for case in CASES["pool_entries"](generator()):
        cu_q, _, tables = case["paged"]
        entries = []
        for cuts in ((0, new), (0, 1, 5, 6, 13, new)):
            rows, made = (type(c)(c.layout, c.keys.clone(), c.values.clone()) for c in (case["rows"], case["entries"]))
            for first, last in pairwise(cuts):
                at = slice(int(cu_q[s]) + first, int(cu_q[s]) + last)
                paged = (torch.tensor([0, last - first], dtype=torch.int32),
                         torch.tensor([context - new + last], dtype=torch.int32),
                         tables[s : s + 1].contiguous())  # fmt: skip
                ops.begin_step()
                ops.pool_entries(case["x"][at].contiguous(), case["slots"][at].contiguous(), rows, made, paged,
                                 case["tables"][s : s + 1].contiguous(), case["pool"])  # fmt: skip
            entries.append(made.keys)
        assert torch.equal(*entries)


@pytest.mark.parametrize("isa", UNITS_HERE)
def test_what_does_not_fit_is_refused(isa: str) -> None:
    case = next(iter(CASES["entry_attention"](generator())))
    chosen = case["reads"].chosen.clone()
    chosen[1, 0] = 1000
    with pytest.raises(ValueError, match="an entry that is not before it"):
        run(ops_of(isa), "entry_attention", case | {"reads": replace(case["reads"], chosen=chosen)})
    with pytest.raises(ValueError, match="a context is longer than its table of entries"):
        run(ops_of(isa), "entry_attention", case | {"tables": case["tables"][:, :2].contiguous()})
    case = next(iter(CASES["pool_entries"](generator())))
    with pytest.raises(ValueError, match="a slot lies outside the cache"):
        run(ops_of(isa), "pool_entries", case | {"slots": case["slots"] + 10**6})
    with pytest.raises(ValueError, match="do not fit a cache"):
        run(
            ops_of(isa), "pool_entries", case | {"pool": replace(case["pool"], bias=case["pool"].bias[:2].contiguous())}
        )
