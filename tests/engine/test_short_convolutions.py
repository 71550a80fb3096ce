"""Layers that convolve tokens: their rows are tokens of a window in the cache, so nothing that runs beside a request,
no cut of its prompt, no draft, no way back and no hit changes a bit of its answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ways_to_serve as ways
from engine_answers import Answer, engine_of
from quire.ops.native import load_native
from speculation_methods import answers, requests_of
from ways_to_serve import answers_alone, check_hits, check_ways_back, compared, written

WAYS = ways.WAYS | {"method": st.sampled_from(("ngram", "suffix", "self"))}
pytestmark = pytest.mark.skipif(load_native() is None, reason="quire._native is not built")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("convolutions"), "convolutions")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[Answer]]:
    return answers_alone(folder)


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


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_hit_at_every_block_changes_no_bit(folder: Path, block_size: int) -> None:
    check_hits(folder, block_size)


def test_a_way_back_after_every_step_changes_no_bit(folder: Path, alone: dict[str, list[Answer]]) -> None:
    check_ways_back(folder, alone)


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
