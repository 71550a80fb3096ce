"""Rows that read chosen tokens behind the engine: recorded steps, shared prefixes, preemption, stores."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from engine_answers import engine_of, make_requests, run
from oracle import BACKENDS, SMALL, edit_config, write
from quire.core.errors import ConfigError
from quire.engine.local import LocalEngine
from speculation_methods import METHODS, TINY, requests_of

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
MODELS = ("indexers", "shared indexers", "block indexers", "pooled indexers", "entries", "gated pools")


def write_model(folder: Path, name: str, dtype: torch.dtype = torch.bfloat16) -> str:
    family, facts = TINY[name]
    write(folder, family, **facts | {"max_position_embeddings": 256}, dtype=dtype)
    return str(folder)


@pytest.mark.parametrize("name", MODELS)
def test_a_request_gives_the_same_bits_whatever_runs_beside_it(name: str, tmp_path: Path) -> None:
    folder, requests = write_model(tmp_path / "model", name), make_requests(24, 99)

    def answers(rng: random.Random | None, some: int, **options: object) -> dict[str, bytes]:
        engine: LocalEngine = engine_of(model=folder, **options)
        return {name: answer.bits() for name, answer in run(engine, requests[:some], rng).items()}

    want = answers(None, 24)
    assert answers(random.Random(1), 24) == want
    assert answers(random.Random(2), 24, num_blocks=24, max_num_batched_tokens=32, max_num_seqs=16) == want
    assert answers(None, 24, enable_prefix_caching=False, max_num_batched_tokens=7, max_num_seqs=5) == want
    assert answers(None, 24, block_size=4, num_blocks=512, kv_store=str(tmp_path / "kv")) == want
    for i in (0, 3, 5):
        engine = engine_of(model=folder, enforce_eager=True)
        assert run(engine, [requests[i]])[f"r{i}"].bits() == want[f"r{i}"]
    edit_config(Path(folder), index_topk=200, index_topk_blocks=200, indexer_budget=3200)
    assert answers(None, 24) != want, "more tokens than are chosen were there to read"


def test_drafts_change_no_bit_of_pools(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "gated pools")
    requests = [each for each in requests_of(SMALL["vocab_size"], "") if each.params.n == 1]
    want = {name: answer.bits() for name, answer in run(engine_of(model=folder), requests).items()}
    engine = engine_of(model=folder, speculative_config=json.dumps(METHODS["ngram"] | {"adaptive": False}))
    assert {name: answer.bits() for name, answer in run(engine, requests).items()} == want
    assert engine.engine.stats().draft_tokens > 0


@pytest.mark.parametrize("name", ["pooled indexers", "entries"])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_beside_ngrams_blocks_and_entries_change_no_bit(method: str, name: str, tmp_path: Path) -> None:
    folder, (_, facts) = write_model(tmp_path, name), TINY[name]
    requests = [each for each in requests_of(SMALL["vocab_size"], "") if each.params.n == 1]
    assert facts.get("ple_layer_ids") or facts["compress_rates"]
    want = {name: answer.bits() for name, answer in run(engine_of(model=folder), requests).items()}
    for options in ({}, {"num_blocks": 24, "max_num_batched_tokens": 32, "max_num_seqs": 8}):
        engine = engine_of(
            model=folder, speculative_config=json.dumps(METHODS[method] | {"adaptive": False}), **options
        )
        assert {name: answer.bits() for name, answer in run(engine, requests).items()} == want
        assert engine.engine.stats().draft_tokens > 0


def test_stages_that_would_share_an_indexer_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "shared indexers")
    with pytest.raises(ConfigError, match="a stage may begin with a layer that reads what one of another stage chose"):
        engine_of(model=folder, pipeline_parallel_size=2)
