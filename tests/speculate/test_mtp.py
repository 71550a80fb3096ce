"""The layer for multi-token prediction in a model's own files: what it drafts, by its formula; files without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_answers import engine_of
from head_layers import relative
from mtp_models import WITH_MTP, write_mtp
from oracle import BACKENDS
from quire.core.errors import ConfigError
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.ops.arrays import Array, to_torch
from quire.speculate.eagle_drafter import EagleDrafter
from speculation_methods import answers, requests_of
from turns import working
from ways_to_serve import differing

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
PROMPT = (9, 30, 41, 7, 12, 33, 5, 78, 20, 17)
ALWAYS = json.dumps({"method": "mtp", "adaptive": False})


def start(engine: Engine, prompt: tuple[int, ...], tokens: int) -> None:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    engine.submit(Request(id="r", prompt=prompt, params=params, seed=1, arrival=0.0))


def logits_seen(engine: Engine) -> list[torch.Tensor]:
    """What the proposer draws from, each time that it draws."""
    assert engine.speculator is not None
    drafter, seen = engine.speculator.proposer, list[torch.Tensor]()
    assert isinstance(drafter, EagleDrafter)
    draw = drafter._sampler.tokens

    def tokens(logits: Array, asked: list[object]) -> list[int]:
        seen.append(to_torch(logits).clone())
        return draw(logits, asked)  # type: ignore[arg-type]

    drafter._sampler.tokens = tokens  # type: ignore[assignment, method-assign]
    return seen


@pytest.mark.parametrize("kind", WITH_MTP)
def test_the_logits_are_those_of_the_formula(kind: str, tmp_path: Path) -> None:
    """In the middle of an answer, over a prompt that was cut into chunks, after drafts that were kept and lost."""
    layer = write_mtp(tmp_path, kind)
    engine = engine_of(
        model=str(tmp_path), dtype="float32", speculative_config=ALWAYS, max_num_batched_tokens=16, max_num_seqs=4
    ).engine
    seen, tried = logits_seen(engine), 0
    start(engine, PROMPT * 4, 24)
    for _ in working(engine):
        engine.step()
        for seq in engine.scheduler.running:
            if len(seq.tokens) <= seq.prompt_len:
                continue
            seen.clear()
            assert engine.speculator is not None
            engine.speculator.draft()
            want = layer.logits(seq.tokens, len(seen))
            assert relative(torch.cat(seen), want) < 1e-5
            assert seq.draft.tokens == want.argmax(-1).tolist()
            tried += len(seen)
            if tried == 6:  # what the target says next takes the place of the draft: kept, as it is right
                made = layer.model.generate(torch.tensor([seq.tokens]), max_new_tokens=3, do_sample=False)
                seq.draft.tokens[:] = made[0, len(seq.tokens) :].tolist()
        if tried > 12:
            return
    assert tried > 9


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks_7": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "preempted": {"block_size": 4, "num_blocks": 32, "max_num_batched_tokens": 32, "max_num_seqs": 16},
    "no_prefix": {"enable_prefix_caching": False},
    "eager": {"enforce_eager": True},
    "block_1": {"block_size": 1, "num_blocks": 4096},
    "kv_int8": {"kv_cache_dtype": "int8"},
    "int8": {"quantization": "int8"},
    "snapshots": {"num_state_slots": 40, "state_interval": 8},
    "tokens_8": {"tokens": 8},
}
"""What runs beside it: options of the engine, or `tokens` of a draft."""
CASES = [(kind, feature) for kind in WITH_MTP for feature in FEATURES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {kind: tmp_path_factory.mktemp(kind) for kind in WITH_MTP}
    for kind, path in made.items():
        write_mtp(path, kind, torch.bfloat16)
    return {kind: str(path) for kind, path in made.items()}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("kind", "feature"), CASES)
def test_the_bits_are_those_of_plain_decoding(kind: str, feature: str, adaptive: bool, folders: dict[str, str]) -> None:
    options = {"model": folders[kind]} | FEATURES[feature]
    if kind == "deepseek_v3" and feature in ("kv_int8", "snapshots"):
        pytest.skip("latents have no such format, and this model no states")
    if feature == "preempted" and WITH_MTP[kind][1].get("layer_types"):
        options["num_blocks"] = 44  # there are several block tables
    asked = {"method": "mtp", "adaptive": adaptive, "num_speculative_tokens": options.pop("tokens", 3)}
    requests = requests_of(99, "")
    want = answers(engine_of(**options, speculative_config='{"method": "none"}'), requests)
    engine = engine_of(**options, speculative_config=json.dumps(asked))
    assert not differing(answers(engine, requests), want)
    assert engine.engine.speculator is not None
    if not adaptive:
        assert engine.engine.speculator.totals.tokens > 0
    if feature == "preempted":
        assert engine.engine.scheduler.preemptions > 0


def test_a_model_without_the_layer_refuses_the_method(tmp_path: Path) -> None:
    write_mtp(tmp_path, "qwen3_5")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({name: t for name, t in tensors.items() if not name.startswith("mtp.")}, str(path))
    with pytest.raises(ConfigError, match=r"method mtp: .*its files have no such layer; use ngram"):
        engine_of(model=str(tmp_path), speculative_config=ALWAYS)
    save_file({name: t for name, t in tensors.items() if name != "mtp.norm.weight"}, str(path))
    with pytest.raises(ConfigError, match=r"missing tensors: mtp\.norm\.weight"):
        engine_of(model=str(tmp_path), speculative_config=ALWAYS)
    assert engine_of(model=str(tmp_path)).engine.speculator is None, "the model alone serves"


def test_the_layer_drafts_where_nothing_is_asked(tmp_path: Path) -> None:
    write_mtp(tmp_path, "qwen3_5", torch.bfloat16)
    options = {"model": str(tmp_path)}
    engine = engine_of(**options).engine
    assert engine.speculator is not None and isinstance(engine.speculator.proposer, EagleDrafter)
    assert engine_of(**options, speculative_config='{"method": "none"}').engine.speculator is None
    assert engine_of(**options, pipeline_parallel_size=1, enable_lora=True).engine.speculator is not None
    with pytest.raises(ConfigError, match="none stands alone"):
        engine_of(**options, speculative_config='{"method": "none", "adaptive": false}')
