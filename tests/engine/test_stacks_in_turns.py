"""Stacks of layers that run in turns (HRM) in an engine: whatever runs beside a request, whatever cuts its prompt, with
drafts, ways back, hits, and on ranks. Weights are there once, keys and values of each run."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ways_to_serve as ways
from attention_variants import GATED_DENSE
from engine_answers import Answer, engine_of
from oracle import BACKENDS, backend, write
from paged_model import load
from quire.model.load.placement import held_bytes
from speculation_methods import answers, requests_of, write_words
from ways_to_serve import answers_alone, check_hits, check_ways_back, compared, differing, written

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
WAYS = ways.WAYS | {"method": st.sampled_from(("ngram", "suffix", "self"))}
REQUESTS = [r for r in requests_of(99, "") if r.params.prompt_logprobs is None][:7]
Made = tuple[Path, dict[str, list[Answer]]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A folder, and what each request gives alone."""
    folder = written(tmp_path_factory.mktemp("turns"), "stacks in turns")
    return folder, answers_alone(folder)


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


def test_the_first_layers_draft(tmp_path: Path) -> None:
    family, facts = GATED_DENSE["hrm_text"]
    write(tmp_path, family, **facts | {"max_position_embeddings": 256}, dtype=torch.float32)
    write_words(tmp_path, 99)

    def found(**options: Any) -> dict[str, list[Answer]]:
        with closing(engine_of(model=str(tmp_path), threads=1, max_model_len=128, **options)) as engine:
            return answers(engine, REQUESTS)

    alone = found()
    for layers in (1, 4, 9):
        drafts = f'{{"method": "self", "layers": {layers}, "num_speculative_tokens": 2, "adaptive": false}}'
        assert not differing(found(speculative_config=drafts), alone), layers


def test_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    family, facts = GATED_DENSE["hrm_text_turns"]
    write(tmp_path, family, **facts | {"max_position_embeddings": 256}, dtype=torch.float32)
    write_words(tmp_path, 99)

    def found(**options: Any) -> dict[str, list[Answer]]:
        with closing(engine_of(model=str(tmp_path), threads=1, max_model_len=128, **options)) as engine:
            return answers(engine, REQUESTS)

    one, two = found(), found(tensor_parallel_size=2, enable_prefix_caching=False)
    assert {name: [row.tokens for row in rows] for name, rows in two.items()} == {
        name: [row.tokens for row in rows] for name, rows in one.items()
    }
    assert not differing(found(tensor_parallel_size=2, max_num_batched_tokens=7, max_num_seqs=3), two)


def test_weights_are_there_once(tmp_path: Path) -> None:
    """Matrices of both stacks, and a row of ones for each norm."""
    family, facts = GATED_DENSE["hrm_text"]
    write(tmp_path, family, **facts)
    decoder = load(tmp_path, backend("cpu")).decoder
    assert len(decoder.layers) == 16
    first = decoder.layers[:2] + decoder.layers[6:8]
    norms = 16 * 4 * 64 * 3
    assert held_bytes(decoder.layers) <= held_bytes(first) + norms
