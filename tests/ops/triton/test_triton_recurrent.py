"""Recurrent states on the GPU backend: bits that no cut of a sequence changes, bf16 rows, layers within a slot."""

from __future__ import annotations

import pytest
import torch

from op_cases import CASES
from op_cases.recurrent import delta_case, delta_spec, ints, state_batch
from recurrent_walks import check_history
from triton_ops import close, gpu_ops, needs_triton, run_gpu, run_reference

pytestmark = [needs_triton, pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")]


@pytest.mark.parametrize(
    "kind", ["delta", "mamba1", *(pytest.param(k, marks=pytest.mark.slow) for k in ("channels", "mamba2"))]
)
def test_no_cut_no_batch_and_no_store_changes_a_bit(kind: str) -> None:
    check_history(gpu_ops(), kind, 1, 8)


@pytest.mark.parametrize("name", ["delta_rule", "ssm_scan", "gated_rmsnorm"])
def test_bf16_activations_are_rounded_once(name: str) -> None:
    few = [case for case in CASES[name](torch.Generator().manual_seed(0)) if len(next(iter(case.values()))) in (2, 3)]
    for case in few[:3]:
        found, expected = run_gpu(name, case, torch.bfloat16), run_reference(name, case, torch.bfloat16)
        for f, e in zip(found, expected, strict=True):
            close(name, f, e, 2**-7)


def test_states_may_lie_apart_and_slots_that_are_not_there_are_not_touched() -> None:
    g, ops = torch.Generator().manual_seed(0), gpu_ops()
    case = delta_case(g, delta_spec(g, 1, 1, 8, 8), [2])
    batch = state_batch([2], [1], [[(2, 0), (1, 2)]])
    together = torch.randn(3, 1, 8, 8, generator=g)
    apart = torch.full((3, 2, 1, 8, 8), torch.nan)
    apart[:, 1] = together
    want = ops.delta_rule(**case | {"states": together, "batch": batch})[1]
    found = ops.delta_rule(**case | {"states": apart[:, 1], "batch": batch})[1]
    assert torch.equal(found, want) and torch.equal(apart[:, 1], together) and apart[:, 0].isnan().all()
    batch.target.copy_(ints([[7, -3]]))
    batch.source.fill_(-1)
    before = together.clone()
    ops.delta_rule(**case | {"states": together, "batch": batch})
    assert torch.equal(together, before)
