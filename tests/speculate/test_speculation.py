"""Speculation changes no bit: every method beside every feature, against plain decoding of the same engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_answers import Answer, engine_of
from head_folders import write_dflash, write_eagle, write_medusa
from oracle import BACKENDS, write
from quire.core.speculation import HEADS
from speculation_methods import METHODS, PYDOC, TINY, answers, requests_of, write_adapter_of_the_embedded, write_words

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks_7": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "chunks_1": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "preempted": {"num_blocks": 8, "max_num_batched_tokens": 32, "max_num_seqs": 16},
    "no_prefix": {"enable_prefix_caching": False},
    "eager": {"enforce_eager": True},
    "one_thread": {"threads": 1},
    "block_1": {"block_size": 1, "num_blocks": 4096},
    "kv_int8": {"kv_cache_dtype": "int8"},
    "kv_fp8": {"kv_cache_dtype": "fp8"},
    "int8": {"quantization": "int8"},
    "lora": {"enable_lora": True},
    "windows": {"model": "windows"},
    "windows_chunks": {"model": "windows", "max_num_batched_tokens": 7, "max_num_seqs": 5},
    "all_windows": {"model": "all_windows"},
    "convolutions": {"model": "convolutions"},
    "experts": {"model": "experts"},
    "latents": {"model": "latents"},
    "indexers": {"model": "indexers"},
}
"""What runs beside it: options of the engine; `model` is one of `TINY`, or else the embedded one."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder for each of `TINY`, one of a draft model for them, and an adapter of the embedded model."""
    made = {}
    for name, (family, facts) in TINY.items():
        path = tmp_path_factory.mktemp(name)
        write(path, family, **facts | {"max_position_embeddings": 256}, dtype=torch.bfloat16)
        made[name] = str(write_words(path, 99))
    path = tmp_path_factory.mktemp("draft")
    write(path, "llama", 3, num_hidden_layers=1, max_position_embeddings=64, vocab_size=104, dtype=torch.bfloat16)
    made["draft"] = str(write_words(path, 99))
    wide = {"windows": 64, "experts": 64, "latents": 64, "all_windows": 64, "convolutions": 64, "embedded": 256,
            "indexers": 64}  # fmt: skip
    for name, hidden in wide.items():
        vocab = 6144 if name == "embedded" else 99
        made[f"medusa {name}"] = str(write_medusa(tmp_path_factory.mktemp("medusa"), hidden, vocab, own=hidden == 64))
        for method, known in (("eagle", 0), ("eagle3", vocab // 2)):
            path = tmp_path_factory.mktemp(method)
            made[f"{method} {name}"] = str(write_eagle(path, method, hidden, vocab, known))
        made[f"dflash {name}"] = str(write_dflash(tmp_path_factory.mktemp("dflash"), hidden, vocab, (0,)))
    made["adapter"] = str(tmp_path_factory.mktemp("adapter"))
    embedded = write_adapter_of_the_embedded(Path(made["adapter"]))
    return made | {"lora": embedded}


def options_of(feature: str, folders: dict[str, str]) -> dict[str, Any]:
    options = dict(FEATURES[feature])
    if "model" in options:
        options["model"] = folders[options["model"]]
    if options.get("enable_lora"):
        options["lora_modules"] = (f"a={folders['lora']}",)
    return options


@pytest.fixture(scope="module")
def golden(folders: dict[str, str]) -> dict[str, dict[str, list[Answer]]]:
    return {}


def in_every_run(feature: str, method: str, adaptive: bool) -> bool:
    """Whether the pair is of those that every run tries: all methods alone, and of the fifteen one beside each
    feature, of methods and trees in turns; two beside other models. The slow run tries them all."""
    place = [*FEATURES].index(feature) + [*METHODS].index(method)
    if feature == "plain":
        return adaptive == bool(place % 2)
    chosen = (3, 10) if "model" in FEATURES[feature] else (3,)
    return place % len(METHODS) in chosen and adaptive == (feature in ("preempted", "experts"))


CASES = [
    pytest.param(
        feature,
        method,
        adaptive,
        id=f"{feature}-{method}-{'adaptive' if adaptive else 'pinned'}",
        marks=[] if in_every_run(feature, method, adaptive) else [pytest.mark.slow],
    )
    for feature in FEATURES
    for method in METHODS
    for adaptive in (False, True)
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("feature", "method", "adaptive"), CASES)
def test_the_bits_are_those_of_plain_decoding(
    feature: str, method: str, adaptive: bool, folders: dict[str, str], golden: dict[str, dict[str, list[Answer]]]
) -> None:
    if adaptive and feature not in ("plain", "preempted", "windows", "experts"):
        pytest.skip("the cost model knows nothing of it")
    if method.endswith("tree") and feature in ("latents", "indexers"):
        pytest.skip("refused, see test_trees_over_latents_are_refused")
    options, tiny = options_of(feature, folders), "model" in FEATURES[feature]
    requests = requests_of(99 if tiny else 6144, "a" if "lora_modules" in options else "")
    if feature not in golden:
        golden[feature] = answers(engine_of(**options), requests)
    asked = METHODS[method] | {"adaptive": adaptive}
    if asked["method"] == "draft_model":
        asked["model"] = folders["draft"] if tiny else PYDOC
    if asked["method"] in HEADS:
        asked["model"] = folders[f"{asked['method']} {FEATURES[feature].get('model', 'embedded')}"]
    engine = engine_of(**options, speculative_config=json.dumps(asked))
    got = answers(engine, requests)
    different = [
        (name, i)
        for name, rows in golden[feature].items()
        for i, (want, found) in enumerate(zip(rows, got[name], strict=True))
        if found.bits() != want.bits() or found.reason != want.reason
    ]
    assert not different, different
    assert engine.engine.speculator is not None
    totals = engine.engine.speculator.totals
    if not adaptive and feature != "chunks_1":
        sure = asked["method"] == "draft_model" or asked["method"] in HEADS
        assert totals.tokens > totals.accepted > 0 or (sure and totals.tokens)
    if feature == "preempted" and asked["method"] == "ngram":
        assert engine.engine.scheduler.preemptions > 0
    if method == "draft_model" and feature in ("plain", "no_prefix", "eager"):
        assert totals.accepted == totals.tokens, (
            "the same model, with the same random numbers, says what the target says"
        )
