"""Heads that draft beside layers with a recurrent state change no bit, and heads of other methods are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_answers import Answer, engine_of
from head_folders import saved, write_dflash, write_eagle, write_medusa
from mtp_models import DELTA, NARROW
from oracle import BACKENDS, edit_config, write
from quire.core.errors import ConfigError
from speculation_methods import answers, requests_of, write_words
from ways_to_serve import differing

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", DELTA | NARROW),
    "qwen3_5": ("qwen3_5_text", DELTA | {"num_hidden_layers": 8, "layer_types": DELTA["layer_types"] * 2}),
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks_7": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "preempted": {"block_size": 4, "num_blocks": 44, "max_num_batched_tokens": 32, "max_num_seqs": 16},
    "no_prefix": {"enable_prefix_caching": False},
    "snapshots": {"num_state_slots": 40, "state_interval": 8},
    "block_1": {"block_size": 1, "num_blocks": 4096},
    "kv_fp8": {"kv_cache_dtype": "fp8"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {name: tmp_path_factory.mktemp(name) for name in (*TARGETS, "medusa", "eagle", "eagle3", "dflash")}
    for name, (family, facts) in TARGETS.items():
        write(made[name], family, **facts | {"max_position_embeddings": 256}, dtype=torch.bfloat16)
        write_words(made[name], 99)
    write_medusa(made["medusa"], 64, 99)
    write_eagle(made["eagle"], "eagle", 64, 99)
    write_eagle(made["eagle3"], "eagle3", 64, 99, 49)
    write_dflash(made["dflash"], 64, 99, (0, 1))
    return {name: str(path) for name, path in made.items()}


@pytest.fixture(scope="module")
def golden() -> dict[tuple[str, str], dict[str, list[Answer]]]:
    return {}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3", "dflash"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("target", TARGETS)
def test_heads_change_no_bit(
    target: str,
    way: str,
    method: str,
    folders: dict[str, str],
    golden: dict[tuple[str, str], dict[str, list[Answer]]],
) -> None:
    options, requests = {"model": folders[target]} | WAYS[way], requests_of(99, "")
    if (target, way) not in golden:
        golden[target, way] = answers(engine_of(**options), requests)
    asked = {"method": method, "model": folders[method], "adaptive": False}
    engine = engine_of(**options, speculative_config=json.dumps(asked))
    assert not differing(answers(engine, requests), golden[target, way])
    assert engine.engine.speculator is not None and engine.engine.speculator.totals.tokens > 0


def test_heads_of_another_method_are_refused(folders: dict[str, str], tmp_path: Path) -> None:
    asked = {"method": "dflash", "model": folders["eagle3"]}
    with pytest.raises(ConfigError, match="mask_token_id"):
        engine_of(model=folders["qwen3_5"], speculative_config=json.dumps(asked))
    saved(tmp_path, {"model_type": "qwen3", "vocab_size": 99}, {"fc.weight": torch.zeros(64, 192)})
    edit_config(tmp_path, architectures=["DFlashDraftModel"])
    asked = {"method": "eagle3", "model": str(tmp_path)}
    with pytest.raises(ConfigError, match="is of the method 'dflash'; ask for that method"):
        engine_of(model=folders["qwen3_5"], speculative_config=json.dumps(asked))
    tree = asked | {"model": folders["eagle3"], "topk": 2, "num_draft_tokens": 4}
    with pytest.raises(ConfigError, match="one branch of a draft"):
        engine_of(model=folders["qwen3_5"], speculative_config=json.dumps(tree))
