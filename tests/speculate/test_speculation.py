"""Speculation changes no bit: every method beside every feature, against plain decoding of the same engine."""

from __future__ import annotations

import paths
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

from head_folders import write_eagle, write_medusa
from oracle import BACKENDS, write
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.core.speculation import HEADS
from quire.engine.local import LocalEngine
from test_bit_equality import Answer, engine_of
from test_lora import write_adapter
from test_mixtures import EIGHT
from test_mla import GROUPS, SIZES
from turns import turns

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")

PYDOC = str(paths.PYDOC)
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    "suffix": {
        "method": "suffix",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 1,
        "suffix_decoding_max_spec_factor": 4.0,
    },
    "self_int4": {"method": "self", "quantization": "int4", "num_speculative_tokens": 3},
    "self_layers": {"method": "self", "layers": 1, "num_speculative_tokens": 2},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 4},
    "medusa": {"method": "medusa"},
    "eagle": {"method": "eagle", "num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 4},
}
GROWN = {"topk": 3, "num_draft_tokens": 9, "num_speculative_tokens": 3}
METHODS |= {
    "ngram_tree": {"method": "ngram", "prompt_lookup_min": 1} | GROWN,
    "suffix_tree": {"method": "suffix", "prompt_lookup_min": 1, "suffix_decoding_max_spec_factor": 4.0} | GROWN,
    "self_tree": {"method": "self", "quantization": "int4"} | GROWN,
    "draft_model_tree": {"method": "draft_model"} | GROWN,
    "medusa_tree": {"method": "medusa", "speculative_token_tree": "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)]"},
    "eagle_tree": {"method": "eagle"} | GROWN,
    "eagle3_tree": {"method": "eagle3"} | GROWN,
}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "windows": ("gemma3_text", {"head_dim": 16, "num_hidden_layers": 3, "sliding_window": 20,
                                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}),
    "experts": ("gpt_oss", EIGHT | {"head_dim": 16, "sliding_window": 16}),
    "latents": ("deepseek_v3", SIZES | GROUPS | {"q_lora_rank": 32, "v_head_dim": 16}),
    "all_windows": ("mistral", {"sliding_window": 20}),
}  # fmt: skip
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
    "experts": {"model": "experts"},
    "latents": {"model": "latents"},
}
"""What runs beside it: options of the engine; `model` is one of `TINY`, or else the embedded one."""


def write_words(folder: Path, count: int, first: str = "<pad>") -> Path:
    """A tokenizer of `count` words."""
    words = {first: 0} | {f"w{i}": i for i in range(1, count)}
    Tokenizer(models.WordLevel(words, unk_token=first)).save(str(folder / "tokenizer.json"))
    return folder


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
    wide = {"windows": 64, "experts": 64, "latents": 64, "all_windows": 64, "embedded": 256}
    for name, hidden in wide.items():
        vocab = 6144 if name == "embedded" else 99
        made[f"medusa {name}"] = str(write_medusa(tmp_path_factory.mktemp("medusa"), hidden, vocab, own=hidden == 64))
        for method, known in (("eagle", 0), ("eagle3", vocab // 2)):
            path = tmp_path_factory.mktemp(method)
            made[f"{method} {name}"] = str(write_eagle(path, method, hidden, vocab, known))
    made["adapter"] = str(tmp_path_factory.mktemp("adapter"))
    embedded = write_adapter_of_the_embedded(Path(made["adapter"]))
    return made | {"lora": embedded}


def write_adapter_of_the_embedded(folder: Path) -> str:
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(PYDOC, dtype=torch.float32)
    return str(write_adapter(folder, oracle, ("q_proj", "v_proj", "down_proj"), 1))


def requests_of(vocab: int, adapter: str) -> list[Request]:
    """Prompts that repeat themselves, under every parameter that changes a token or its log-probability."""
    rng = random.Random(7)
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 1},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
        {"temperature": 1.0, "top_p": 0.8, "top_k": 20, "min_p": 0.02},
        {"temperature": 0.0, "logit_bias": {7: 4.0, 9: -5.0}, "min_tokens": 12},
        {"temperature": 0.5, "allowed_token_ids": tuple(range(5, 60))},
        {"temperature": 0.8, "n": 3},
        {"temperature": 0.0, "prompt_logprobs": 1},
        {"temperature": 0.6, "stop_token_ids": tuple(range(20, 30))},
    ]
    made = []
    for i, way in enumerate(ways * 2):
        stem = [rng.randrange(3, vocab) for _ in range(rng.choice((3, 9, 17)))]
        prompt = (stem * 12)[: rng.choice((1, 20, 40, 70))]
        params = SamplingParams(max_tokens=rng.choice((1, 2, 9, 30, 40)), logprobs=2, **way)
        words = ((stem[0], stem[1]), (stem[2],)) if i % 4 == 1 else ()
        name = adapter if i % 3 == 0 else ""
        made.append(
            Request(
                id=f"r{i}",
                prompt=tuple(prompt),
                params=params,
                seed=i,
                arrival=0.0,
                eos_token_ids=(2,),
                bad_words_ids=words,
                adapter=name,
            )
        )
    return made


def answers(engine: LocalEngine, requests: list[Request]) -> dict[str, list[Answer]]:
    """What every sequence gave, trickling in at random steps."""
    alone = {r.id: [Answer([], []) for _ in range(r.params.n)] for r in requests}
    rng, waiting = random.Random(5), list(requests)
    for _ in turns(lambda: waiting or engine.engine.has_work):
        batch = waiting[: rng.randint(0, 6)]
        for request in batch:
            engine.submit(request)
        del waiting[: len(batch)]
        report = engine.poll(0)
        for out in report.outputs if report else ():
            assert out.error is None, out.error
            answer = alone[out.request_id][out.index]
            answer.tokens += out.tokens
            answer.logprobs += [*(out.prompt_logprobs or ()), *out.logprobs]
            answer.reason = out.finish_reason
        engine.engine.pool.check()
    engine.engine.check()
    return alone


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


@pytest.mark.parametrize(("feature", "method", "adaptive"), CASES)
def test_the_bits_are_those_of_plain_decoding(
    feature: str, method: str, adaptive: bool, folders: dict[str, str], golden: dict[str, dict[str, list[Answer]]]
) -> None:
    if adaptive and feature not in ("plain", "preempted", "windows", "experts"):
        pytest.skip("the cost model knows nothing of it")
    if method.endswith("tree") and feature == "latents":
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
