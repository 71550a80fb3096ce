"""20,000 histories of sixteen models with a recurrent state: none changes a bit of an answer.

A history is a way to serve seven of eighteen requests, drawn anew: bounds of steps, blocks, slots and snapshots, drafts
and a cache that may be scarce, so that requests wait, share, are preempted and come back. A thousand take about two
minutes of one core.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_answers import Answer
from quire.ops.native import load_native
from ways_to_serve import MORE, STATE_WAYS, answers_alone, compared, written

pytestmark = [pytest.mark.slow, pytest.mark.skipif(load_native() is None, reason="quire._native is not built")]
OF_TINY = ("states", "scans", "layers_of_one_part", "beside", "channel_scans", "scans_alone", "decays of channels",
           "shared_blocks")  # fmt: skip
KINDS = (*OF_TINY, *MORE)
HISTORIES = 20_000


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("hybrids"), request.param)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[Answer]]:
    return answers_alone(folder)


@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # of `alone`, where an example fails
@settings(max_examples=-(-HISTORIES // len(KINDS)), deadline=None)
@given(way=st.fixed_dictionaries(STATE_WAYS), seed=st.integers(0, 100_000))
def test_no_history_changes_a_bit(folder: Path, alone: dict[str, list[Answer]], way: dict[str, Any], seed: int) -> None:
    compared(folder, alone, way, seed)
