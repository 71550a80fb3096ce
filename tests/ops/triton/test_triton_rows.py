"""Attention and row-wise ops of the GPU backend: bits that no batch changes, trees, narrow caches, bf16 activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from often import one_of
from op_cases import CASES
from op_cases import reference as cases
from op_runs import branch, one_sequence, tree_case
from quire.core.dtypes import BF16, F8, F16, F32, I8, Dtype
from quire.ops.attention_spec import AttentionSpec
from quire.ops.layout import KVLayout, SharedLayout
from quire.ops.op import Case
from quire.ops.reference.caches import allocate
from triton_ops import HAS_TRITON, close, gpu_ops, needs_triton, on_gpu, run_gpu, run_reference

pytestmark = [needs_triton, pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")]
if HAS_TRITON:
    from quire.ops.triton import attention as launcher
ROWWISE = ("rmsnorm", "add_rmsnorm", "layernorm", "add_layernorm", "norm_spans", "gated_activation", "activation",
           "softcap", "clip", "scale", "scale_rows", "add", "join_columns", "place_columns", "take_columns",
           "take_rows", "pick_rows", "add_positions", "rope_queries", "rope_and_cache", "lora", "lora_expand",
           "lora_scale", "latent_rope_and_cache", "xielu", "match_lengths", "sparse_gate")  # fmt: skip


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def attend(case: Case, name: str = "attention") -> Tensor:
    return run_gpu(name, case)[0]


def parts_of(rows: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int, int]]:
    """(sequence, first, last): single rows, chunks that begin and end anywhere, whole sequences."""
    for s, (count, _) in enumerate(rows):
        yield from {(s, 0, count), (s, count - 1, count), (s, count // 3, min(count, count // 3 + 40))}


@pytest.mark.parametrize(
    ("dtype", "block_size", "window", "extras"),
    [
        (BF16, 1, 150, "softcap sinks"),
        (I8, 16, 0, "alibi bias"),
        (BF16, 16, -150, ""),
        pytest.param(BF16, 16, 0, "", marks=pytest.mark.slow),
        pytest.param(F32, 32, 100, "sinks alibi", marks=pytest.mark.slow),
        pytest.param(F8, 64, 0, "softcap", marks=pytest.mark.slow),
    ],
)
def test_a_row_of_attention_does_not_depend_on_the_batch(
    dtype: Dtype, block_size: int, window: int, extras: str
) -> None:
    rows = ((130, 600), (1, 1100), (1, 1), (37, 37), (2, 600))
    case = cases.attention_case(generator(1), KVLayout(block_size, 1, 64, dtype), 3, rows, window, extras=extras)
    whole = attend(case)  # a program for all splits of the first, the fourth and the last sequence
    for s, first, last in parts_of(rows):
        begin = int(case["cu_q"][s])
        assert torch.equal(attend(one_sequence(case, s, first, last)), whole[begin + first : begin + last]), (s, first)


@pytest.mark.slow
def test_who_computes_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ((24, 700), (40, 1100), (1, 530))
    case = cases.attention_case(generator(2), KVLayout(16, 2, 64, BF16), 8, rows, extras="sinks")
    found = []
    for chunk_rows in (1, 100):
        monkeypatch.setattr(launcher, "CHUNK_ROWS", chunk_rows)
        found.append(attend(case))
        gpu = gpu_ops().gpu
        assert gpu is not None
        monkeypatch.setattr(gpu, "chip", replace(gpu.chip, processors=100))  # a program per split
        found.append(attend(case))
        monkeypatch.undo()
    assert all(torch.equal(f, found[0]) for f in found)


def test_a_bias_by_distance_needs_one_row_per_head() -> None:
    case = cases.attention_case(generator(), KVLayout(16, 1, 32, F32), 2, ((2, 40),))
    for shape in ((3, 5), (2, 0), (10,)):
        with pytest.raises(ValueError, match="bias"):
            attend(case | {"spec": AttentionSpec(1.0, bias=torch.zeros(shape))})


@pytest.mark.parametrize(("sinks", "window"), [(False, 0), (True, 0), (True, 33), (False, 550)])
def test_a_row_of_latent_attention_does_not_depend_on_the_batch(sinks: bool, window: int) -> None:
    from op_cases.mla import latent_case
    from quire.ops.latents import LatentLayout

    rows = ((100, 700), (1, 600), (37, 37))
    case = latent_case(generator(1), LatentLayout(16, 1, 8, BF16, rank=32), 4, 16, rows, sinks, window)
    whole = attend(case, "latent_attention")
    for s, first, last in parts_of(rows):
        begin, end = int(case["cu_q"][s]), int(case["cu_q"][s + 1])
        part = case | {
            "latent": case["latent"][begin + first : begin + last].contiguous(),
            "q": case["q"][begin + first : begin + last].contiguous(),
            "cu_q": torch.tensor([0, last - first], dtype=torch.int32),
            "context": torch.tensor([int(case["context"][s]) - (end - begin) + last], dtype=torch.int32),
            "block_tables": case["block_tables"][s : s + 1].contiguous(),
        }
        assert torch.equal(attend(part, "latent_attention"), whole[begin + first : begin + last]), (s, first)


@pytest.mark.parametrize("size", [1, 16])
def test_blocks_of_latents_may_lie_apart(size: int) -> None:
    """As they do where layers of other groups have the rest of a block."""
    from op_cases.mla import beside_others, latent_case
    from quire.ops.latents import LatentHeads, LatentLayout

    ops, g = gpu_ops(), generator(1)
    case = on_gpu_case(latent_case(g, LatentLayout(size, 1, 8, BF16, rank=32), 4, 16, ((40, 600), (1, 70))))
    apart, others = beside_others(case["cache"])
    found = [ops.latent_attention(**case | {"cache": cache}) for cache in (case["cache"], apart)]
    assert torch.equal(*found)
    written = on_gpu_case({
        "kv": torch.randn(41, 40, generator=g), "table": torch.rand(50, 2, 4, generator=g),
        "positions": torch.arange(41, dtype=torch.int32), "slots": torch.randperm(2 * 41, generator=g)[:41],
    })  # fmt: skip
    written["slots"][5] = -1
    heads = LatentHeads(4, torch.rand(32, generator=g).to(ops.gpu.device))
    for cache in (case["cache"], apart):
        given = {name: value.clone() for name, value in written.items()} | {"q": case["q"].clone()}
        ops.latent_rope_and_cache(**given, cache=cache, heads=heads)
    for kept, held in ((case["cache"].keys, apart.keys), (case["cache"].values, apart.values)):
        assert torch.equal(kept.nan_to_num(), held.nan_to_num()) and not kept.isnan().all()
    assert all(bool((part == 255).all()) for part in others)


def test_blocks_that_layers_share_are_copied_and_wiped() -> None:
    ops = gpu_ops()
    with ops.gpu.device:
        whole = allocate(SharedLayout.of(16, 40), 5)
        whole.keys[:] = torch.arange(1, 6)[:, None]
    ops.copy_blocks([whole], ((1, 3),))
    ops.zero_blocks([whole], (2,))
    assert [row.unique().tolist() for row in whole.keys.cpu()] == [[1], [2], [0], [2], [5]]


def on_gpu_case(case: Case) -> Case:
    return {name: on_gpu(value, gpu_ops()) for name, value in case.items()}


@pytest.mark.parametrize(
    ("dtype", "block_size", "window", "extras", "chunk_rows"),
    [
        (BF16, 16, 0, "bias", 100),
        pytest.param(F32, 4, 70, "softcap alibi", 1, marks=pytest.mark.slow),
        pytest.param(I8, 64, 530, "sinks", 1, marks=pytest.mark.slow),
    ],
)
def test_a_branch_of_a_draft_equals_the_same_tokens_alone(
    dtype: Dtype, block_size: int, window: int, extras: str, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "CHUNK_ROWS", chunk_rows)
    case, masks = tree_case(KVLayout(block_size, 1, 64, dtype), 3, window, extras)
    whole = attend(case)
    want = run_reference("attention", case)[0]
    close("attention", whole, want, 1e-5 if dtype == F32 else 2e-2)
    for s, own in enumerate(masks):
        for row in range(0, len(own), 6 if len(own) < 20 else 30):
            assert torch.equal(attend(branch(case, masks, s, row))[0], whole[int(case["cu_q"][s]) + row]), (s, row)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [F16, I8, F8])
def test_narrow_caches_hold_what_the_definition_stores(dtype: Dtype) -> None:
    """Codes may differ by one where the rotation before them was rounded otherwise; values are stored as they come."""
    for number, case in enumerate(cases.rope_and_cache_cases(generator(), (dtype,))):
        if number == 1:
            case["qkv"][2, :] = torch.tensor([torch.nan, torch.inf, 1e-38, 0.0]).repeat(50)
        (*_, k, v), (*_, want_k, want_v) = (keys_and_values(run, case) for run in (run_gpu, run_reference))
        for found, want in ((k, want_k), (v, want_v)):
            step = {F16: 2**-10, I8: 1 / 127, F8: 1 / 8}[dtype]
            largest = want.nan_to_num(0, 0, 0).abs().amax(-1, keepdim=True)
            assert torch.equal(found.isnan(), want.isnan())
            error = (found - want).nan_to_num(0, 0, 0).abs()
            assert bool((error <= 1.001 * step * largest + 1e-12).all())
            assert (error > 1e-6 * largest).float().mean() < 0.02
        assert torch.equal(v.nan_to_num(), want_v.nan_to_num())


def keys_and_values(run: Any, case: Case) -> list[Tensor]:
    """The two tensors of four dimensions that a run leaves: the caches as numbers."""
    return [t for t in run("rope_and_cache", case) if t.dim() == 4]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", one_of(3, ROWWISE))
def test_bf16_activations_are_rounded_once(name: str) -> None:
    for case in CASES[name](generator()):
        if name == "add_layernorm" and case["x"].sum() > 50 * case["x"].numel():
            continue  # the sum is rounded to steps of 0.5, and the mean taken away
        found, expected = run_gpu(name, case, torch.bfloat16), run_reference(name, case, torch.bfloat16)
        for f, e in zip(found, expected, strict=True):
            close(name, f, e, 2**-7)


def stream_calls(rows: int) -> dict[str, Case]:
    """Ops of several streams and calls of them: Hy4's widths, and gates of Gemma 3n."""
    g = generator(1)
    x, m = torch.randn(rows, 4 * 96, generator=g), torch.randn(rows, 33, generator=g)
    return {
        "mix_streams": {"x": x, "m": m, "weight": torch.randn(4, 33, generator=g),
                        "bias": torch.randn(4, generator=g), "out": 1},
        "match_lengths": {"x": x, "streams": 4, "least": 1e-5},
        "sparse_gate": {"x": torch.randn(rows, 2 * 777, generator=g), "factor": 1.64},
    }  # fmt: skip


@pytest.mark.parametrize("name", stream_calls(1))
def test_streams_of_a_row_do_not_depend_on_the_batch(name: str) -> None:
    case = stream_calls(65)[name]
    whole = run_gpu(name, case)[0]
    for row in range(0, 65, 8):
        alone = {k: v[row : row + 1] if k in ("x", "m") else v for k, v in case.items()}
        assert torch.equal(run_gpu(name, alone)[0][0], whole[row]), row


def test_a_row_without_a_slot_is_not_stored() -> None:
    case = next(iter(cases.rope_and_cache_cases(generator(), (BF16,)))) | {"slots": torch.tensor([-1])}
    ops = gpu_ops()
    args = {k: on_gpu(v, ops) for k, v in case.items()}
    ops.rope_and_cache(**args)
    assert not args["cache"].keys.any() and not args["cache"].values.any()


def test_a_token_outside_the_table_gives_no_numbers() -> None:
    out = gpu_ops().embedding(torch.tensor([0, 7, -1], dtype=torch.int32), torch.ones(7, 16))
    assert out.isnan().all(1).tolist() == [False, True, True]
