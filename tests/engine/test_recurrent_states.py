"""Layers with a recurrent state: no cut of a prompt, no draft, no way back, no snapshot and nothing that runs beside a
request changes a bit of its answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_answers import Answer, engine_of
from quire.core.errors import ConfigError
from quire.ops.native import load_native
from ways_to_serve import STATE_WAYS, answers_alone, check_hits, check_ways_back, compared, written

pytestmark = pytest.mark.skipif(load_native() is None, reason="quire._native is not built")
KINDS = (
    "states",
    "scans",
    "layers_of_one_part",
    "beside",
    "channel_scans",
    "scans_alone",
    "decays of channels",
    "shared_blocks",
)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("states"), kind)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[Answer]]:
    return answers_alone(folder)


@settings(max_examples=6, deadline=None)
@given(way=st.fixed_dictionaries(STATE_WAYS), seed=st.integers(0, 1000))
def test_no_way_to_serve_changes_a_bit(
    folder: Path, alone: dict[str, list[Answer]], way: dict[str, Any], seed: int
) -> None:
    compared(folder, alone, way, seed)


def test_a_hit_at_every_snapshot_changes_no_bit(folder: Path) -> None:
    check_hits(folder, 4, num_state_slots=200, state_interval=4)


def test_a_way_back_after_every_step_changes_no_bit(folder: Path, alone: dict[str, list[Answer]]) -> None:
    check_ways_back(folder, alone)


def test_drafts_that_branch_and_steps_of_one_row_are_refused(kind: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        engine_of(model=str(folder), max_num_batched_tokens=1, max_num_seqs=1)
    tree = '{"method": "suffix", "num_speculative_tokens": 4, "topk": 2}'
    with pytest.raises(ConfigError, match="one branch" if kind != "decays of channels" else "do not branch"):
        engine_of(model=str(folder), speculative_config=tree)
