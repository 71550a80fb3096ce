"""Attention over drafts that branch: each row as if its ancestors were the only draft, bit for bit."""

from __future__ import annotations

import functools

import pytest
import torch

from often import one_of
from op_cases import reference as cases
from op_runs import as_int64, branch, tree_case
from over_torch import select
from quire.core.config import DeviceConfig
from quire.core.dtypes import BF16, F32, Dtype
from quire.ops.backend import Ops
from quire.ops.layout import KV_FORMATS, KVLayout
from quire.ops.native import load_native

native = load_native()
UNITS_HERE: list[str] = native.units() if native else []


@functools.cache
def ops_of(isa: str) -> Ops:
    return select(DeviceConfig(device="reference") if isa == "reference" else DeviceConfig(isa=isa, threads=2))


SHAPES = [
    (16, 64, 0, ""),
    (1, 24, 70, "softcap"),
    (4, 80, 0, "alibi"),
    (64, 32, 530, "sinks alibi"),
    (128, 16, 3, "softcap sinks alibi"),
    (16, 40, -70, ""),
]
# Every run tries each two of unit, format and shape together, with one of four of the third; the slow one all.
CASES = [
    pytest.param(*shape, dtype, isa, marks=[pytest.mark.slow] if (i + j + k) % 4 else [])
    for i, shape in enumerate(SHAPES)
    for j, dtype in enumerate(KV_FORMATS)
    for k, isa in enumerate(UNITS_HERE)
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("block_size", "d", "window", "extras", "dtype", "isa"), CASES)
def test_a_branch_equals_the_same_tokens_alone(
    block_size: int, d: int, window: int, extras: str, dtype: Dtype, isa: str
) -> None:
    ops = ops_of(isa)
    case, masks = tree_case(KVLayout(block_size, 2, d, dtype), 6, window, extras)
    ops.begin_step()
    whole = ops.attention(**case).clone()
    for s, own in enumerate(masks):
        for row in range(0, len(own), 1 if len(own) < 20 else 7):
            ops.begin_step()
            alone = ops.attention(**branch(case, masks, s, row))
            assert torch.equal(alone[0], whole[int(case["cu_q"][s]) + row]), (s, row)


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("dtype", one_of(2, KV_FORMATS))
def test_equals_the_reference(dtype: Dtype, isa: str) -> None:
    for block_size, d, window, extras in ((16, 64, 0, ""), (1, 40, 70, "softcap"), (32, 32, 0, "sinks alibi")):
        case, _ = tree_case(KVLayout(block_size, 1, d, dtype), 3, window, extras, seed=3)
        want = ops_of("reference").attention(**case)
        ops_of(isa).begin_step()
        found = ops_of(isa).attention(**case)
        assert (want - found).abs().max() <= (2e-6 if dtype == F32 else 2e-2) * want.abs().max()


@pytest.mark.parametrize("isa", UNITS_HERE)
def test_a_chain_is_a_draft_without_branches(isa: str) -> None:
    case = cases.attention_case(torch.Generator().manual_seed(1), KVLayout(16, 2, 64, BF16), 4, ((64, 600),))
    ops = ops_of(isa)
    ops.begin_step()
    plain = ops.attention(**case).clone()
    chain = torch.tensor([as_int64((2 << i) - 1) for i in range(64)])
    assert torch.equal(ops.attention(**case, tree=chain), plain)


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ([0, 1, 0], "last of their sequence"),
        ([0, 1, 1], "see itself"),
        ([1, 3, 6], "what its parent sees"),
        ([0, 3, 2], "no later token"),
    ],
)
def test_masks_that_are_no_tree_are_refused(masks: list[int], message: str) -> None:
    case = cases.attention_case(torch.Generator().manual_seed(0), KVLayout(16, 1, 16, F32), 1, ((3, 9),))
    with pytest.raises(ValueError, match=message):
        ops_of("auto").attention(**case, tree=torch.tensor(masks))


def test_a_draft_has_at_most_64_tokens() -> None:
    case = cases.attention_case(torch.Generator().manual_seed(0), KVLayout(16, 1, 16, F32), 1, ((65, 70),))
    with pytest.raises(ValueError, match="more than 64"):
        ops_of("auto").attention(**case, tree=torch.ones(65, dtype=torch.int64))
