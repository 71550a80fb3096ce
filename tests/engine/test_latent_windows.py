"""Latents with windows beside latents that an indexer chooses, in an engine: whatever runs beside a request, whatever
cuts its prompt, with drafts, ways back, hits, and on ranks."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ways_to_serve as ways
from engine_answers import Answer, engine_of
from oracle import BACKENDS
from speculation_methods import answers, requests_of
from ways_to_serve import answers_alone, check_hits, check_ways_back, compared, differing, written

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
KIND = "windows of latents"
WAYS = ways.WAYS | {"method": st.sampled_from(("ngram", "suffix", "self"))}
REQUESTS = [r for r in requests_of(99, "") if r.params.prompt_logprobs is None][:7]
Made = tuple[Path, dict[str, list[Answer]]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A folder, and what each request gives alone."""
    folder = written(tmp_path_factory.mktemp("latents"), KIND)
    return folder, answers_alone(folder)


def test_layers_of_both_kinds_have_blocks_of_their_own(made: Made) -> None:
    with closing(engine_of(model=str(made[0]))) as engine:
        groups = engine.engine.kv.groups
        assert sorted({*groups.windows}) == [0, 5]


@settings(max_examples=4, deadline=None)
@given(way=st.fixed_dictionaries(WAYS), seed=st.integers(0, 1000))
def test_no_way_to_serve_changes_a_bit(made: Made, way: dict[str, Any], seed: int) -> None:
    compared(*made, way, seed)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(way=st.fixed_dictionaries(WAYS), seed=st.integers(0, 1000))
def test_no_way_of_many_changes_a_bit(made: Made, way: dict[str, Any], seed: int) -> None:
    compared(*made, way, seed)


def test_a_hit_at_every_block_changes_no_bit(made: Made) -> None:
    check_hits(made[0], 4)


def test_a_way_back_after_every_step_changes_no_bit(made: Made) -> None:
    check_ways_back(*made)


def test_two_ranks_say_what_one_says(made: Made) -> None:
    def found(**options: Any) -> dict[str, list[Answer]]:
        asked = {"model": str(made[0]), "dtype": "float32", "threads": 1, "max_model_len": 128}
        with closing(engine_of(**asked | options)) as engine:
            return answers(engine, REQUESTS)

    one, two = found(), found(tensor_parallel_size=2, enable_prefix_caching=False)
    assert {name: [row.tokens for row in rows] for name, rows in two.items()} == {
        name: [row.tokens for row in rows] for name, rows in one.items()
    }
    assert not differing(found(tensor_parallel_size=2, max_num_batched_tokens=7, max_num_seqs=3), two)
