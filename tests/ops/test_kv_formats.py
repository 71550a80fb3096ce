"""Caches in fp16, int8 and fp8: what is stored, who may see it, and what it costs in quality."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator

import pytest
import torch

from op_cases import reference as cases
from over_torch import select
from quire.core.config import DeviceConfig, flat_config
from quire.core.dtypes import F8, F16, F32, I8, Dtype
from quire.core.errors import ConfigError
from quire.core.params import SamplingParams
from quire.engine.llm import LLM
from quire.model.disk.checkpoint import EMBEDDED
from quire.ops.backend import Ops
from quire.ops.layout import LARGEST, KVCache, KVLayout
from quire.ops.native import load_native
from quire.ops.op import Case
from quire.ops.reference.caches import allocate, logical, quantize_rows, scales, value_codes, write

native = load_native()
UNITS_HERE: list[str] = native.units() if native else []
NARROW = (F16, I8, F8)
SCALED = tuple(LARGEST)


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def ops_of(isa: str) -> Ops:
    return select(DeviceConfig(device="cpu", isa=isa, threads=2))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def copied(case: Case) -> Case:
    cache = case["cache"]
    return case | {
        "qkv": case["qkv"].clone(),
        "cache": KVCache(cache.layout, cache.keys.clone(), cache.values.clone()),
    }


@pytest.mark.parametrize("dtype", SCALED)
def test_codes_are_the_nearest_and_scales_reach_the_largest(dtype: Dtype) -> None:
    x = cases.normal(generator(), 500, 64) * 10.0 ** torch.arange(-8, 12).repeat(25)[:, None]
    codes, scale = quantize_rows(x, dtype)
    assert torch.equal(codes.float().abs().amax(-1), torch.full((500,), LARGEST[dtype]))
    error = (codes.float() * scale[:, None] - x).abs()
    step = 0.5001 * scale[:, None] if dtype == I8 else torch.maximum(x.abs() / 16, scale[:, None] * 2**-10) * 1.001
    assert bool((error <= step).all())


@pytest.mark.parametrize("dtype", SCALED)
def test_zeros_and_numbers_that_are_none(dtype: Dtype) -> None:
    x = torch.zeros(5, 16)
    x[1, 3], x[2, 4], x[3, 5], x[4] = torch.nan, torch.inf, -torch.inf, 1e-38
    codes, scale = quantize_rows(x, dtype)
    assert not codes.float().any()
    assert scale.isnan().tolist() == [False, True, True, True, False] and scale[0] == 0


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("dtype", NARROW)
def test_the_native_store_equals_the_reference(dtype: Dtype, isa: str) -> None:
    """Codes may differ by one where the rotation before them was rounded otherwise; scales by an ulp."""
    reference = select(DeviceConfig(device="reference"))
    for number, case in enumerate(cases.rope_and_cache_cases(generator(), (dtype,))):
        if number == 1:
            case["qkv"][2, :] = torch.tensor([torch.nan, torch.inf, 1e-38, 0.0]).repeat(50)
        caches = []
        for ops in (reference, ops_of(isa)):
            own = copied(case)
            ops.rope_and_cache(**own)
            caches.append(own["cache"])
        layout, every = caches[0].layout, torch.arange(len(caches[0].keys))
        for want, found in zip(*(logical(cache, every) for cache in caches), strict=True):
            assert torch.equal(want.isnan(), found.isnan())
            step = {F16: 2**-10, I8: 1 / 127, F8: 1 / 8}[dtype]
            largest = want.nan_to_num(0, 0, 0).abs().amax(-1, keepdim=True)
            error = (want - found).nan_to_num(0, 0, 0).abs()
            assert bool((error <= 1.001 * step * largest + 1e-12).all())
            assert (error > 1e-6 * largest).float().mean() < 0.02
        if layout.scaled:
            values = [scales(layout, cache.values) for cache in caches]
            assert torch.equal(values[0].nan_to_num(-1), values[1].nan_to_num(-1)), "values are stored as they come"
            assert torch.equal(*(value_codes(layout, cache.values).float() for cache in caches))


def rows_of(case: Case, s: int, first: int, last: int) -> Case:
    """Rows first..last of sequence `s` as a batch of their own."""
    begin, end = int(case["cu_q"][s]), int(case["cu_q"][s + 1])
    return case | {
        "qkv": case["qkv"][begin + first : begin + last].contiguous(),
        "cu_q": torch.tensor([0, last - first], dtype=torch.int32),
        "context": torch.tensor([int(case["context"][s]) - (end - begin) + last], dtype=torch.int32),
        "block_tables": case["block_tables"][s : s + 1].contiguous(),
    }


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("block_size", [1, 8, 16, 128])
def test_a_row_does_not_depend_on_the_batch(block_size: int, dtype: Dtype, isa: str) -> None:
    ops = ops_of(isa)
    rows = ((130, 700), (1, 1300), (1, 1), (37, 37), (2, 600))
    layout = KVLayout(block_size, 2, 40 if block_size == 8 else 64, dtype)
    case = cases.attention_case(generator(1), layout, 6, rows, 150 if block_size == 16 else 0)
    ops.begin_step()
    whole = ops.attention(**case).clone()
    assert bool(whole.isfinite().all())
    for s, (count, _) in enumerate(rows):
        begin = int(case["cu_q"][s])
        for size in (1, 64, count) if s == 0 else (1, count):
            for first in range(0, count, size)[:: max(1, count // size // 4)]:
                last = min(count, first + size)
                ops.begin_step()
                part = ops.attention(**rows_of(case, s, first, last))
                assert torch.equal(part, whole[begin + first : begin + last]), (s, first, last)


@pytest.mark.parametrize("dtype", NARROW)
def test_attention_does_not_depend_on_the_block_size(dtype: Dtype) -> None:
    found = []
    k, v, qkv = (cases.normal(generator(6 + i), 700, 2, 32) for i in range(3))
    for block_size in (1, 2, 16, 64):
        case = cases.attention_case(generator(5), KVLayout(block_size, 2, 32, dtype), 4, ((5, 700),))
        at = torch.arange(700)
        slots = case["block_tables"][0, at // block_size].long() * block_size + at % block_size
        write(case["cache"], slots, k, v)
        case["qkv"] = qkv[:5].repeat(1, 1, 4).flatten(1).contiguous()
        ops_of("auto").begin_step()
        found.append(ops_of("auto").attention(**case).clone())
    assert all(torch.equal(f, found[0]) for f in found)


@pytest.mark.parametrize(("dtype", "bytes_per_token"), [(F16, 256), (I8, 136), (F32, 512)])
def test_what_a_token_takes(dtype: Dtype, bytes_per_token: int) -> None:
    layout = KVLayout(16, 1, 64, dtype)
    cache = allocate(layout, 3)
    assert layout.bytes_per_token == bytes_per_token
    assert sum(t.numel() * t.element_size() for t in (cache.keys, cache.values)) == 3 * 16 * bytes_per_token


def test_other_spellings_and_an_unknown_one() -> None:
    for given, kept in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("fp8_e4m3", "fp8")):
        assert flat_config(kv_cache_dtype=given).cache.kv_cache_dtype == kept
    with pytest.raises(ConfigError, match="kv-cache-dtype"):
        flat_config(kv_cache_dtype="int4")


@pytest.mark.parametrize(
    ("dtype", "least", "most_divergence"), [("float16", 0.97, 1e-3), ("int8", 0.9, 5e-3), ("fp8", 0.7, 5e-2)]
)
def test_quality_on_the_embedded_model(dtype: str, least: float, most_divergence: float) -> None:
    """Greedy answers that stay the same, and how far the next token's distribution moves, against an f32 cache."""
    questions = [json.loads(line) for line in (EMBEDDED / "questions.jsonl").read_text().splitlines()][::150]
    chats = [[{"role": "user", "content": row["question"]}] for row in questions]
    greedy = SamplingParams(temperature=0.0, max_tokens=60, logprobs=8)
    answers = []
    for kind in ("float32", dtype):
        outputs = LLM(kv_cache_dtype=kind, num_blocks=512).chat(chats, greedy)
        answers.append([out.outputs[0] for out in outputs])
    same = sum(a.text == b.text for a, b in zip(*answers, strict=True)) / len(chats)
    divergence = []
    for a, b in zip(*answers, strict=True):
        p, q = ({t: lp.logprob for t, lp in step.items()} for step in (a.logprobs[1], b.logprobs[1]))
        divergence += [sum(torch.tensor(p[t]).exp().item() * (p[t] - q[t]) for t in p.keys() & q.keys())]
    assert same >= least, f"{same:.0%} of the answers unchanged"
    assert abs(sum(divergence) / len(divergence)) < most_divergence
