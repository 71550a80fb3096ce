"""Prompts with images beside every way to draft: their answers keep their bits, and they are drafted for."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine_answers import Answer, run
from head_folders import write_dflash, write_eagle, write_medusa
from made_up_tower import HIDDEN, SIGHTS, VOCAB, Part, Shown, image_request, sighted, write_text
from mixture_variants import FEW
from model_variants import EIGHT
from oracle import BACKENDS, write
from quire.core.config import flat_config
from quire.core.request import Request
from quire.core.speculation import LOOK_UPS
from quire.engine.local import LocalEngine
from quire.model.spec import Sight
from speculation_methods import GROWN, write_words
from vision_prompts import write_made

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
MANY = 8
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"num_speculative_tokens": 4, "prompt_lookup_min": 1},
    "suffix": {"num_speculative_tokens": 4, "prompt_lookup_min": 1, "suffix_decoding_max_spec_factor": 4.0},
    "self": {"quantization": "int4", "num_speculative_tokens": 3},
    "self layers": {"method": "self", "layers": 2, "num_speculative_tokens": 2},
    "draft_model": {"num_speculative_tokens": 4},
    "draft_model trees": {"method": "draft_model"} | GROWN,
    "medusa": {},
    "eagle": {"num_speculative_tokens": 3},
    "eagle3": {"num_speculative_tokens": 4},
    "eagle3 trees": {"method": "eagle3"} | GROWN,
    "dflash": {"num_speculative_tokens": 5},
}


TARGETS = {name: SIGHTS[name] for name in ("llama", "sections", "mutual")}
TARGETS["experts"] = (
    "qwen3_moe",
    FEW | {"head_dim": 24, "moe_intermediate_size": 32},
    Sight(sections=(6, 3, 3), interleaved=True),
)
TARGETS["more experts"] = ("gpt_oss", EIGHT | {"head_dim": 16, "sliding_window": 16}, Sight())


def text(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


PROMPTS: dict[str, list[Part]] = {
    "none": [text(19, 1)],
    "one": [text(5, 2), Shown(1, 3, 4), text(6, 3)],
    "same beginning, no image": [text(5, 2), text(20, 9)],
    "first": [Shown(4, 2, 5), text(4, 7)],
    "late": [text(21, 8), Shown(1, 3, 4), text(12, 9), Shown(5, 4, 4), text(2, 10)],
}


def asked() -> list[Request]:
    made = [image_request(name, parts, seed=i, max_tokens=24) for i, (name, parts) in enumerate(PROMPTS.items())]
    return made + [
        replace(each, id=f"{each.id}-sampled", params=replace(each.params, temperature=1.0)) for each in made
    ]


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sight]:
    folder = tmp_path_factory.mktemp(request.param)
    family, facts, sight = TARGETS[request.param]
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * (MANY // 2)} if "layer_types" in facts else {}
    write(folder, family, **facts | kinds | {"num_hidden_layers": MANY})
    return write_words(folder, VOCAB), sight


@pytest.fixture(scope="module")
def alone(target: tuple[Path, Sight]) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    with sighted(*target, enable_prefix_caching=False) as (engine, _):
        for each in asked():
            answers |= run(engine, [each])
    return answers


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("drafts")
    write_text(folder / "draft_model", "llama")
    write_words(folder / "draft_model", VOCAB)
    write_medusa(folder / "medusa", HIDDEN, VOCAB)
    for method in ("eagle", "eagle3"):
        write_eagle(folder / method, method, HIDDEN, VOCAB)
    write_dflash(folder / "dflash", HIDDEN, VOCAB, (1, 3, 5))
    return {name: str(folder / name) for name in ("draft_model", "medusa", "eagle", "eagle3", "dflash")}


def spoken_of(method: str, drafts: dict[str, str]) -> str:
    way = {"method": method, "adaptive": False} | METHODS[method]
    return json.dumps(way | ({"model": drafts[str(way["method"])]} if way["method"] in drafts else {}))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("method", METHODS)
def test_drafts_change_no_bit_of_what_has_images(
    method: str, target: tuple[Path, Sight], alone: dict[str, Answer], drafts: dict[str, str]
) -> None:
    spoken = spoken_of(method, drafts)
    for options in ({}, {"max_num_batched_tokens": 32, "max_num_seqs": 7, "num_blocks": 110}):
        with sighted(*target, speculative_config=spoken, **options) as (engine, _):
            for _ in range(2):
                got = run(engine, asked(), random.Random(method))
                assert [name for name in got if got[name].bits() != alone[name].bits()] == []
            stats = engine.engine.stats()
            assert stats.used_blocks == 0 and stats.draft_tokens > 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("method", [method for method in METHODS if method not in LOOK_UPS])
def test_what_has_images_is_drafted_for(method: str, target: tuple[Path, Sight], drafts: dict[str, str]) -> None:
    requests = [each for each in asked() if each.images]
    with sighted(*target, speculative_config=spoken_of(method, drafts)) as (engine, _):
        for each in requests:
            before = engine.engine.stats().draft_tokens
            run(engine, [each])
            assert engine.engine.stats().draft_tokens > before, each.id


def test_a_model_with_a_tower_starts_beside_a_draft_model(tmp_path: Path) -> None:
    write_made("qwen3_vl", real := tmp_path / "real")
    config = json.loads((real / "config.json").read_text())["text_config"]
    write(tmp_path / "draft", "llama", vocab_size=config["vocab_size"])
    for name in ("real", "draft"):
        write_words(tmp_path / name, config["vocab_size"])
    asked = json.dumps({"method": "draft_model", "model": str(tmp_path / "draft")})
    engine = LocalEngine(flat_config(model=str(real), device="cpu", num_blocks=32, speculative_config=asked))
    assert engine.info.takes_images and engine.info.drafts == "draft_model"
    engine.close()
