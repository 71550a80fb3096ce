"""Layers with a recurrent state: no cut of a prompt, no draft, no way back, no snapshot and nothing that runs beside a
request changes a bit of its answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_answers import Answer, engine_of, run
from quire.core.errors import ConfigError
from quire.ops.native import load_native
from turns import reports
from ways_to_serve import STATE_WAYS, answers_alone, asked, check_hits, check_ways_back, compared, written

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


@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # of `alone`, where an example fails
@settings(max_examples=3, deadline=None)  # test_hybrid_histories.py tries thousands
@given(way=st.fixed_dictionaries(STATE_WAYS), seed=st.integers(0, 1000))
def test_no_way_to_serve_changes_a_bit(
    folder: Path, alone: dict[str, list[Answer]], way: dict[str, Any], seed: int
) -> None:
    compared(folder, alone, way, seed)


def test_a_hit_at_every_snapshot_changes_no_bit(folder: Path) -> None:
    check_hits(folder, 4, num_state_slots=200, state_interval=4)


def test_a_way_back_after_every_step_changes_no_bit(folder: Path, alone: dict[str, list[Answer]]) -> None:
    check_ways_back(folder, alone)


@pytest.mark.parametrize("drafts", ["", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'])
def test_a_conversation_goes_on_behind_each_answer_with_the_same_bits(folder: Path, drafts: str) -> None:
    plain = engine_of(model=str(folder), enable_prefix_caching=False)
    options = {"speculative_config": drafts} if drafts else {}
    warm = engine_of(model=str(folder), block_size=4, num_blocks=4096, num_state_slots=200, **options)
    said = [*range(10, 31)]
    for turn in range(5):
        request = asked(f"turn {turn}", said)
        want = run(plain, [request])[request.id]
        warm.submit(request)
        got, cached = Answer([], []), 0
        for report in reports(warm):
            for out in report.outputs:
                got.tokens += out.tokens
                got.logprobs += out.logprobs
                cached = max(cached, out.cached_tokens)
        assert got.bits() == want.bits(), turn
        whole = (len(said) - 4) // 4 * 4
        assert cached == 0 if not turn else whole - 4 * bool(drafts) <= cached <= whole, turn
        said = [*said, *got.tokens, 90 + turn, 40, 41]


def test_drafts_that_branch_and_steps_of_one_row_are_refused(kind: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        engine_of(model=str(folder), max_num_batched_tokens=1, max_num_seqs=1)
    tree = '{"method": "suffix", "num_speculative_tokens": 4, "topk": 2}'
    with pytest.raises(ConfigError, match="one branch" if kind != "decays of channels" else "do not branch"):
        engine_of(model=str(folder), speculative_config=tree)
