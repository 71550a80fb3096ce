"""A model with recurrent states beside what engines do for others: beams, grammars, weights on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine_answers import Answer, engine_of, make_requests, run
from oracle import BACKENDS
from quire import LLM
from quire.engine.beam import BeamSearchParams
from shaped import shaped_requests
from speculation_methods import answers, write_speaking

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaking(tmp_path_factory.mktemp("hybrid") / "m", "states")


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_beams_begin_with_snapshots_and_are_those_without(block_size: int, folder: Path) -> None:
    prompt, params = [*range(20, 61)], BeamSearchParams(beam_width=4, max_tokens=12, ignore_eos=True)
    found = []
    for caching in (False, True):
        options: dict[str, Any] = {"num_blocks": 2048, "block_size": block_size, "enable_prefix_caching": caching}
        with LLM(str(folder), tune="off", **options) as llm:
            beams = llm.beam_search(prompt, params)[0].sequences
            found.append([(beam.tokens, beam.cum_logprob) for beam in beams])
            hits = llm.engine.engine.stats().prefix_hits
            assert hits > 30 * 40 if caching else not hits, "four beams, a token each time"
    assert found[0] == found[1]


def test_shaped_answers_are_those_of_a_request_alone(folder: Path) -> None:
    options: dict[str, Any] = {"model": str(folder), "max_model_len": 256}
    requests = shaped_requests(9)
    plain = engine_of(enable_prefix_caching=False, **options)
    alone: dict[str, list[Answer]] = {r.id: answers(plain, [r])[r.id] for r in requests}
    many = engine_of(num_state_slots=9, max_num_batched_tokens=24, max_num_seqs=6, **options)
    for turn in range(2):
        found = answers(many, [replace(r, id=f"{turn} {r.id}") for r in requests])
        for name, rows in alone.items():
            assert [row.bits() for row in rows] == [row.bits() for row in found[f"{turn} {name}"]], name


def test_layers_from_a_file_change_no_bit(folder: Path, tmp_path: Path) -> None:
    requests = make_requests(8, 6144)
    options: dict[str, Any] = {"model": str(folder), "max_model_len": 256, "dtype": "float32"}
    want = run(engine_of(**options), requests)
    offload = {"weight_offload": "disk", "weight_memory_gib": 0.008, "weight_offload_folder": str(tmp_path)}
    found = run(engine_of(**options, **offload), requests)
    assert all(found[name].bits() == answer.bits() for name, answer in want.items())
