"""Layers that convolve tokens: their rows are tokens of a window in the cache, so nothing that runs beside a request,
no cut of its prompt, no draft, no way back and no hit changes a bit of its answer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ways_to_serve as ways
from engine_answers import Answer, engine_of, run
from oracle import write
from quire.ops.native import load_native
from speculation_methods import TINY, answers, requests_of, write_words
from turns import reports
from ways_to_serve import asked, compared, differing

WAYS = ways.WAYS | {"method": st.sampled_from(("ngram", "suffix", "self"))}
pytestmark = pytest.mark.skipif(load_native() is None, reason="quire._native is not built")
BLOCK = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lfm2")
    family, facts = TINY["convolutions"]
    write(path, family, **facts | {"max_position_embeddings": 256}, dtype=torch.bfloat16)
    return write_words(path, 99)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[Answer]]:
    """What each request gives alone, without a prefix cache."""
    engine = engine_of(model=str(folder), enable_prefix_caching=False)
    return {r.id: answers(engine, [r])[r.id] for r in requests_of(99, "")}


@settings(max_examples=6, deadline=None)
@given(way=st.fixed_dictionaries(WAYS), seed=st.integers(0, 1000))
def test_no_way_to_serve_changes_a_bit(
    folder: Path, alone: dict[str, list[Answer]], way: dict[str, Any], seed: int
) -> None:
    compared(folder, alone, way, seed)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(way=st.fixed_dictionaries(WAYS), seed=st.integers(0, 1000))
def test_no_way_of_many_changes_a_bit(
    folder: Path, alone: dict[str, list[Answer]], way: dict[str, Any], seed: int
) -> None:
    compared(folder, alone, way, seed)


@pytest.mark.parametrize("block_size", [1, BLOCK])
def test_a_hit_at_every_block_changes_no_bit(folder: Path, block_size: int) -> None:
    """Of requests that share their first blocks, each found as far as it is shared."""
    rng = random.Random(3)
    prompt = [rng.randrange(3, 99) for _ in range(40)]
    requests = [asked("cold", prompt)]
    for shared in range(0, 41, block_size):
        own = [rng.randrange(3, 99) for _ in range(rng.choice((1, 3, 6)))]
        requests.append(asked(str(shared), prompt[:shared] + own, temperature=0.5 * (shared % 2)))
    plain = engine_of(model=str(folder), enable_prefix_caching=False)
    warm = engine_of(model=str(folder), block_size=block_size, num_blocks=4096)
    for request in requests:
        want = run(plain, [request])[request.id]
        warm.submit(request)
        got, cached = Answer([], []), -1
        for report in reports(warm):
            for out in report.outputs:
                got.tokens += out.tokens
                got.logprobs += out.logprobs
                cached = max(cached, out.cached_tokens)
        assert got.bits() == want.bits(), request.id
        if request.id != "cold":
            assert cached >= int(request.id) // block_size * block_size, request.id
    again = run(warm, [asked("again", prompt)])["again"]
    assert again.bits() == run(plain, [asked("again", prompt)])["again"].bits(), "all of the prompt is found"


def test_a_way_back_after_every_step_changes_no_bit(folder: Path, alone: dict[str, list[Answer]]) -> None:
    """A sequence that gives everything back whenever it has computed something, as far as it then comes."""
    requests = [r for r in requests_of(99, "") if r.params.n == 1][:6]
    engine = engine_of(model=str(folder), block_size=BLOCK, num_blocks=1024, max_num_batched_tokens=16, max_num_seqs=8)
    for request in requests:
        engine.submit(request)
    got = {r.id: [Answer([], [])] for r in requests}
    rng = random.Random(11)
    for report in reports(engine):
        for out in report.outputs:
            answer = got[out.request_id][0]
            answer.tokens += out.tokens
            answer.logprobs += [*(out.prompt_logprobs or ()), *out.logprobs]
            answer.reason = out.finish_reason
        scheduler = engine.engine.scheduler
        for seq in [*scheduler.running]:
            if rng.random() < 0.6:
                scheduler._preempt(seq)
    assert engine.engine.scheduler.preemptions > 20
    assert not differing(got, {r.id: alone[r.id] for r in requests})


def test_a_cache_in_codes_keeps_rows_as_numbers(folder: Path) -> None:
    """int8 keys and values beside rows in bf16: a request has the same bits in any chunk."""
    engines = [
        engine_of(model=str(folder), kv_cache_dtype="int8", max_num_batched_tokens=count, max_num_seqs=1)
        for count in (5, 512)
    ]
    assert all(engine.info.kv_cache_dtype == "int8" for engine in engines)
    for request in requests_of(99, "")[:4]:
        few, many = (answers(engine, [request])[request.id] for engine in engines)
        assert [a.bits() for a in few] == [a.bits() for a in many]
