"""The indexer's ops on every instruction set, and attention to the tokens that it chooses."""

from __future__ import annotations

import pytest
import torch

from op_cases import CASES
from op_cases.indexer import MIXED, index_case, whole_numbers
from op_cases.mla import beside_others, chosen_tokens, latent_case, reading
from op_runs import UNITS_HERE, close, copied, generator, ops_of, reference, run
from quire.core.dtypes import BF16, F32, Dtype
from quire.ops.indexer import Choice, IndexLayout
from quire.ops.latents import LatentLayout
from quire.ops.op import Case


@pytest.mark.parametrize("isa", UNITS_HERE)
def test_choices_equal_the_reference(isa: str) -> None:
    for case in CASES["choose_tokens"](generator()):
        assert torch.equal(run(ops_of(isa), "choose_tokens", case)[0], run(reference(), "choose_tokens", case)[0])


@pytest.mark.parametrize("isa", UNITS_HERE)
def test_choices_of_blocks_equal_the_reference(isa: str) -> None:
    for case in CASES["choose_blocks"](generator()):
        found, want = (run(ops, "choose_blocks", case)[:3] for ops in (ops_of(isa), reference()))
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("isa", UNITS_HERE)
def test_choices_by_keys_of_blocks_equal_the_reference(isa: str) -> None:
    for case in CASES["choose_pooled"](generator()):
        found, want = (run(ops, "choose_pooled", case)[:3] for ops in (ops_of(isa), reference()))
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("isa", UNITS_HERE)
def test_stored_keys_equal_the_reference(isa: str) -> None:
    for case in CASES["index_rope_and_cache"](generator()):
        tolerance = 2e-5 if case["cache"].layout.dtype == F32 else 1e-2
        found, expected = (run(ops, "index_rope_and_cache", case) for ops in (ops_of(isa), reference()))
        for got, want in zip(found, expected, strict=True):
            close(isa, got, want, tolerance)


@pytest.mark.parametrize("isa", UNITS_HERE)
def test_keys_of_pools_equal_the_reference(isa: str) -> None:
    for case in CASES["pool_keys"](generator()):
        tolerance = 2e-5 if case["cache"].layout.dtype == F32 else 1e-2
        found, expected = (run(ops, "pool_keys", case) for ops in (ops_of(isa), reference()))
        for got, want in zip(found, expected, strict=True):
            close(isa, got, want, tolerance)


@pytest.mark.parametrize("isa", [*UNITS_HERE, "reference"])
def test_of_equal_scores_the_earlier_token_is_chosen(isa: str) -> None:
    ops = reference() if isa == "reference" else ops_of(isa)
    case = index_case(generator(), IndexLayout.of(16, 8, F32), 2, Choice(5), ((1, 40), (3, 9)))
    case |= {"weights": torch.zeros_like(case["weights"]) * -1.0}
    assert run(ops, "choose_tokens", case)[0].tolist() == [[0, 1, 2, 3, 4]] * 4
    case["weights"][:] = 1.0
    keys = case["cache"].keys
    keys[:] = 0.0
    keys[case["block_tables"][0, 33 // 16].long(), 33 % 16] = case["q"].view(4, 2, 8)[0, 0]
    assert run(ops, "choose_tokens", case)[0].tolist()[0] == [0, 1, 2, 3, 33]


def alone(case: Case, s: int, first: int, last: int) -> Case:
    """Rows first..last of sequence `s` of a case, in a batch of their own."""
    begin, end = int(case["cu_q"][s]), int(case["cu_q"][s + 1])
    at, rows = slice(begin + first, begin + last), ("q", "weights", "latent")
    if "reads" in case:
        case = reading(case, case["reads"].chosen[at].contiguous())
    return case | {name: case[name][at].contiguous() for name in rows if name in case} | {
        "cu_q": torch.tensor([0, last - first], dtype=torch.int32),
        "context": torch.tensor([int(case["context"][s]) - (end - begin) + last], dtype=torch.int32),
        "block_tables": case["block_tables"][s : s + 1].contiguous(),
    }  # fmt: skip


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("name", ["choose_tokens", "latent_attention", "latent_attention with sinks"])
def test_a_row_does_not_depend_on_the_batch(name: str, dtype: Dtype, isa: str) -> None:
    name, _, sinks = name.partition(" with ")
    ops, rows, g = ops_of(isa), ((40, 1100), (3, 3), (1, 700)), generator()
    if name == "choose_tokens":
        case = index_case(g, IndexLayout.of(16, 64, dtype), 40, Choice(100), rows, exact=False)
    else:
        case = latent_case(g, LatentLayout(16, 1, 16, dtype, rank=32), 6, 24, rows, bool(sinks))
        case = reading(case, chosen_tokens(g, case, 600))
    whole, begin = run(ops, name, case)[0], 0
    for s, (count, _) in enumerate(rows):
        for first, last in ((0, 1), (count // 2, count), (count - 1, count)):
            part = run(ops, name, alone(case, s, first, last))[0]
            assert torch.equal(part, whole[begin + first : begin + last]), (s, first, last)
        begin += count


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_all_tokens_chosen_are_as_none(dtype: Dtype, sinks: bool, isa: str) -> None:
    """Bit for bit, so a row does not depend on how many tokens could be chosen."""
    rows = ((40, 1100), (5, 5), (1, 700))
    case = latent_case(generator(), LatentLayout(16, 1, 16, dtype, rank=32), 40, 24, rows, sinks)
    ops, every = ops_of(isa), chosen_tokens(generator(), case, 1200)
    few = chosen_tokens(generator(), case, 600)
    want, same, other = (run(ops, "latent_attention", c)[0] for c in (case, reading(case, every), reading(case, few)))
    assert torch.equal(want, same) and not torch.equal(want, other)


@pytest.mark.parametrize("isa", [*UNITS_HERE, "reference"])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_blocks_may_lie_apart(dtype: Dtype, isa: str) -> None:
    """As they do where layers of other groups have the rest of a block."""
    ops, g = reference() if isa == "reference" else ops_of(isa), generator()
    case = index_case(g, IndexLayout.of(16, 24, dtype), 3, Choice(8), MIXED)
    apart, others = beside_others(case["cache"])
    want = run(ops, "choose_tokens", case)[0]
    ops.begin_step()
    assert torch.equal(ops.choose_tokens(**case | {"cache": apart}).float(), want)
    written = {
        "q": whole_numbers(g, 40, 3 * 24), "k": whole_numbers(g, 40, 24), "table": torch.rand(50, 2, 8), "heads": 3,
        "positions": torch.arange(40, dtype=torch.int32), "slots": torch.randperm(2 * 40, generator=g)[:40],
    }  # fmt: skip
    for cache in (case["cache"], apart):
        ops.begin_step()
        ops.index_rope_and_cache(**{name: copied(value) for name, value in written.items()}, cache=cache)
    assert torch.equal(case["cache"].keys.nan_to_num(), apart.keys.nan_to_num())
    assert all(bool((part == 255).all()) for part in others)


@pytest.mark.parametrize("isa", UNITS_HERE)
def test_tokens_that_are_not_before_a_row_are_refused(isa: str) -> None:
    case = latent_case(generator(), LatentLayout(16, 1, 16, F32, rank=32), 6, 24, ((2, 20),))
    chosen = chosen_tokens(generator(), case, 4)
    chosen[0, 3] = 19
    with pytest.raises(ValueError, match="not before it"):
        ops_of(isa).latent_attention(**reading(case, chosen))
