"""Invariant 1: the same request gives the same tokens and bit-identical log-probabilities, whatever runs beside it.

On the native backend, over the embedded model: alone, in random batches, with any chunking, prefix hit or miss,
preempted, on one thread or several, replayed from a recording or driven op by op.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest

from engine_answers import FORMATS, Answer, engine_of, make_requests, replace_id, run
from quire.core.params import SamplingParams
from quire.core.request import Request
from turns import reports

VARIANTS: dict[str, dict[str, object]] = {
    "batch": {},
    "chunks_1": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "chunks_7": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "chunks_512": {"max_num_batched_tokens": 512},
    "no_prefix": {"enable_prefix_caching": False},
    "preempted": {"num_blocks": 24, "max_num_batched_tokens": 32, "max_num_seqs": 16},
    "eager": {"enforce_eager": True},
    "one_thread": {"threads": 1},
}
FEW, MANY = 40, 200

Golden = Callable[[str, int], tuple[list[Request], dict[str, Answer]]]


@pytest.fixture(scope="module")
def golden() -> Golden:
    """So many requests, each alone in a fresh batch of one and without a prefix cache."""

    @cache
    def of(fmt: str, count: int) -> tuple[list[Request], dict[str, Answer]]:
        engine = engine_of(enable_prefix_caching=False, **FORMATS[fmt])
        requests = make_requests(count, engine.info.vocab_size)
        return requests, {r.id: run(engine, [r])[r.id] for r in requests}

    return of


# Every run tries each format in a third of the ways, spread evenly; the slow one all, and some with more requests.
PAIRS = [
    pytest.param(
        fmt, variant, FEW, id=f"{fmt}-{variant}", marks=[pytest.mark.slow] if variant != "batch" and (i + j) % 3 else []
    )
    for i, fmt in enumerate(FORMATS)
    for j, variant in enumerate(VARIANTS)
] + [
    pytest.param(fmt, variant, MANY, id=f"{fmt}-{variant}-many", marks=pytest.mark.slow)
    for fmt in ("bf16", "int8")
    for variant in VARIANTS
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("fmt", "variant", "count"), PAIRS)
def test_same_request_same_bits(golden: Golden, fmt: str, variant: str, count: int) -> None:
    requests, want = golden(fmt, count)
    engine = engine_of(**(FORMATS[fmt] | VARIANTS[variant]))
    got = run(engine, requests, random.Random(variant))
    differing = [r.id for r in requests if got[r.id].bits() != want[r.id].bits()]
    assert not differing, f"{len(differing)} of {len(requests)} requests differ: {differing[:5]}"
    stats = engine.engine.stats()
    if variant == "preempted":
        assert stats.preemptions > 0
    if variant == "batch":
        assert stats.prefix_hits > 0
        again = run(engine, [replace_id(r, "again") for r in requests])
        assert all(again[f"again-{r.id}"].bits() == want[r.id].bits() for r in requests), "differs on a prefix hit"
    assert stats.used_blocks == 0


def tokens_of_blocks(size: int) -> dict[str, list[int]]:
    """What 30 requests give with blocks of `size` tokens."""
    engine = engine_of(block_size=size, num_blocks=16384 // size, dtype="float32")
    return {k: a.tokens for k, a in run(engine, make_requests(30, 6144)).items()}


@pytest.fixture(scope="module")
def of_blocks_of_16() -> dict[str, list[int]]:
    return tokens_of_blocks(16)


@pytest.mark.parametrize("block_size", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 8, 32)), 128])
def test_block_size_only_moves_memory(block_size: int, of_blocks_of_16: dict[str, list[int]]) -> None:
    assert tokens_of_blocks(block_size) == of_blocks_of_16


def test_siblings_share_their_prompt_and_differ_from_each_other() -> None:
    engine = engine_of()
    prompt = tuple(range(100, 150))
    params = SamplingParams(n=4, max_tokens=8, temperature=1.0, logprobs=0)
    for name in ("first", "second"):
        engine.submit(Request(id=name, prompt=prompt, params=params, seed=11, arrival=0.0))
    rows: dict[tuple[str, int], list[int]] = {}
    most = 0
    for report in reports(engine):
        most = max(most, report.stats.used_blocks)
        for out in report.outputs:
            rows.setdefault((out.request_id, out.index), []).extend(out.tokens)
    assert [rows["first", i] for i in range(4)] == [rows["second", i] for i in range(4)]
    assert len({tuple(rows["first", i]) for i in range(4)}) > 1
    assert most < 2 * 4 * 4, "eight sequences of 58 tokens without sharing would hold 32 blocks"
