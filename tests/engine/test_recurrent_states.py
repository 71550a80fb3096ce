"""Layers with a recurrent state: no cut of a prompt, no draft, no way back, no snapshot and nothing that runs beside a
request changes a bit of its answer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_answers import Answer, engine_of, run
from oracle import write
from quire.core.errors import ConfigError
from quire.ops.native import load_native
from speculation_methods import TINY, answers, requests_of, write_words
from turns import reports
from ways_to_serve import WAYS, asked, compared, differing

pytestmark = pytest.mark.skipif(load_native() is None, reason="quire._native is not built")
BLOCK = 4
STATE_WAYS = WAYS | {
    "method": st.sampled_from(("ngram", "suffix")),
    "max_num_batched_tokens": st.sampled_from((2, 3, 7, 16, 64, 512)),
    "num_state_slots": st.sampled_from((0, 3, 9, 40)),
    "state_interval": st.sampled_from((0, 1, 8, 32)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("states")
    family, facts = TINY["states"]
    write(path, family, **facts | {"max_position_embeddings": 256}, dtype=torch.bfloat16)
    return write_words(path, 99)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[Answer]]:
    """What each request gives alone, without a prefix cache."""
    engine = engine_of(model=str(folder), enable_prefix_caching=False)
    return {r.id: answers(engine, [r])[r.id] for r in requests_of(99, "")}


@settings(max_examples=6, deadline=None)
@given(way=st.fixed_dictionaries(STATE_WAYS), seed=st.integers(0, 1000))
def test_no_way_to_serve_changes_a_bit(
    folder: Path, alone: dict[str, list[Answer]], way: dict[str, Any], seed: int
) -> None:
    compared(folder, alone, way, seed)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(way=st.fixed_dictionaries(STATE_WAYS), seed=st.integers(0, 1000))
def test_no_way_of_many_changes_a_bit(
    folder: Path, alone: dict[str, list[Answer]], way: dict[str, Any], seed: int
) -> None:
    compared(folder, alone, way, seed)


def test_a_hit_at_every_snapshot_changes_no_bit(folder: Path) -> None:
    """Of requests that share their first blocks, each begins with the last state of what it shares."""
    rng = random.Random(3)
    prompt = [rng.randrange(3, 99) for _ in range(40)]
    requests = [asked("cold", prompt)]
    for shared in range(0, 41, BLOCK):
        own = [rng.randrange(3, 99) for _ in range(rng.choice((1, 3, 6)))]
        requests.append(asked(str(shared), prompt[:shared] + own, temperature=0.5 * (shared % 2)))
    plain = engine_of(model=str(folder), enable_prefix_caching=False)
    warm = engine_of(model=str(folder), block_size=BLOCK, num_blocks=4096, num_state_slots=200, state_interval=BLOCK)
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
            assert cached >= int(request.id), request.id
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


def test_drafts_that_branch_and_steps_of_one_row_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        engine_of(model=str(folder), max_num_batched_tokens=1, max_num_seqs=1)
    tree = '{"method": "suffix", "num_speculative_tokens": 4, "topk": 2}'
    with pytest.raises(ConfigError, match="one branch"):
        engine_of(model=str(folder), speculative_config=tree)
