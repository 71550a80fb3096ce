"""Prompts with images in models that draft by a layer of their own: its rows read the embedding of the token after
theirs, which may be a row of an image."""

from __future__ import annotations

import json
import random
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from engine_answers import Answer, run
from head_layers import relative
from made_up_tower import HIDDEN, Shown, features, image_request, sighted
from mtp_drafts import logits_seen
from mtp_models import MtpLayer, main_rows, write_mtp
from oracle import BACKENDS
from quire.core.config import flat_config
from quire.core.images import grid_positions
from quire.core.request import Request
from quire.core.sequence import Sequence
from quire.engine.local import LocalEngine
from quire.model.spec import Sight
from turns import working
from vision_prompts import write_made

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
SIGHT = Sight(sections=(1, 1, 0), interleaved=True)
"""Two pairs of a head turn, the second by rows."""
ALWAYS = {"speculative_config": json.dumps({"method": "mtp", "adaptive": False})}
NONE = {"speculative_config": '{"method": "none"}'}


def text(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 99) for _ in range(count)]


PROMPTS: dict[str, list[Any]] = {
    "one": [text(5, 2), Shown(1, 3, 4), text(6, 3)],
    "three": [text(3, 4), Shown(1, 3, 4), text(1, 5), Shown(2, 2, 2), Shown(3, 1, 5), text(9, 6)],
    "first and last": [Shown(4, 2, 5), text(4, 7), Shown(5, 3, 3)],
    "late": [text(30, 8), Shown(1, 3, 4), text(12, 9), Shown(5, 4, 4), text(2, 10)],
    "none": [text(19, 1)],
}


def asked(**params: Any) -> list[Request]:
    made = [image_request(name, parts, seed=i, max_tokens=24) for i, (name, parts) in enumerate(PROMPTS.items())]
    made += [replace(each, id=f"{each.id}-sampled", params=replace(each.params, temperature=1.0)) for each in made]
    return [replace(each, params=replace(each.params, **params)) for each in made]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MtpLayer]:
    folder = tmp_path_factory.mktemp("qwen3_5")
    return folder, write_mtp(folder, "qwen3_5")


@pytest.fixture(scope="module")
def alone(made: tuple[Path, MtpLayer]) -> dict[str, Answer]:
    """Each request alone, without drafts."""
    answers: dict[str, Answer] = {}
    with sighted(made[0], SIGHT, enable_prefix_caching=False, **NONE) as (engine, _):
        for each in asked():
            answers |= run(engine, [each])
    return answers


WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 7},
    "no_prefix": {"enable_prefix_caching": False, "enforce_eager": True},
    "preempted": {"max_num_batched_tokens": 32, "max_num_seqs": 16, "num_blocks": 34},
    "small_cache": {"encoder_cache_tokens": 16, "max_num_encoder_tokens": 4},
    "adaptive": {"speculative_config": '{"method": "mtp"}'},
    "two ranks": {"tensor_parallel_size": 2, "threads": 1},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
def test_drafts_beside_images_change_no_bit(way: str, made: tuple[Path, MtpLayer], alone: dict[str, Answer]) -> None:
    want = alone
    options = ALWAYS | WAYS[way]
    if "tensor_parallel_size" in options:
        with sighted(made[0], SIGHT, **options | NONE) as (engine, _):
            want = run(engine, asked())
    with sighted(made[0], SIGHT, **options) as (engine, _):
        for _ in range(2):
            got = run(engine, asked(), random.Random(way))
            assert [name for name in got if got[name].bits() != want[name].bits()] == []
        stats = engine.engine.stats()
        assert stats.used_blocks == 0 and (way == "adaptive" or stats.draft_tokens > 0)
        assert way != "preempted" or stats.preemptions > 0
        assert way != "together" or stats.prefix_hits > 0


@torch.no_grad()
def by_formula(layer: MtpLayer, seq: Sequence, count: int) -> Tensor:
    """Logits [count, V] of the tokens after those of `seq`, as `MtpLayer.logits`, with rows of images given."""
    images, row = seq.request.images, [*seq.tokens]
    given = torch.cat([features(image, HIDDEN) for image in images])

    def embedded(tokens: list[int]) -> Tensor:
        seen = torch.tensor([token >= 99 for token in tokens])
        x = layer.model.get_input_embeddings()(torch.tensor(tokens).where(~seen, torch.tensor(0))).clone()
        x[seen] = given[: int(seen.sum())]
        return x

    def turns(x: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        places = torch.from_numpy(grid_positions(images, 0, tokens)).float()
        rope = layer.model.model.rotary_emb
        angles = places[torch.tensor([0, 1])].T * rope.inv_freq[None]  # pair 0 turns by time, pair 1 by row
        both = torch.cat((angles, angles), -1)[None]
        return both.cos(), both.sin()

    def block(module: Any, x: Tensor) -> Tensor:
        n = x.shape[1]
        mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
        linear = not hasattr(module, "self_attn")
        out: Tensor = module(
            x, position_embeddings=turns(x, n), attention_mask=None if linear else mask, position_ids=None
        )
        return out

    main_rows(layer.model, [5, 6])  # the sequential definition takes the place of chunks
    x = embedded(row[:-1])[None]
    for each in layer.model.model.layers:
        x = block(each, x)
    hidden, found = layer.model.model.norm(x)[0], []
    for _ in range(count):
        both = torch.cat((layer.token_norm(embedded(row)[1:]), layer.hidden_norm(hidden)), -1)
        last = layer.final_norm(block(layer.block, layer.join(both)[None]))[0, -1:]
        found.append(layer.model.lm_head(last)[0])
        row.append(int(found[-1].argmax()))
        hidden = torch.cat((hidden, last))
    return torch.stack(found)


@pytest.mark.parametrize("budget", [64, 12])
@pytest.mark.parametrize("name", [name for name in PROMPTS if name != "none"])
def test_the_logits_are_those_of_the_formula(name: str, budget: int, made: tuple[Path, MtpLayer]) -> None:
    folder, layer = made
    options = ALWAYS | {"max_num_batched_tokens": budget, "max_num_seqs": 4}
    with sighted(folder, SIGHT, **options) as (local, _):
        engine, tried = local.engine, 0
        seen = logits_seen(engine)
        engine.submit(image_request(name, PROMPTS[name], seed=1, max_tokens=12))
        for _ in working(engine):
            engine.step()
            for seq in engine.scheduler.running:
                if len(seq.tokens) <= seq.prompt_len:
                    continue
                seen.clear()
                assert engine.speculator is not None
                engine.speculator.draft()
                if not seen:  # the answer is at its end
                    continue
                want = by_formula(layer, seq, len(seen))
                assert relative(torch.cat(seen), want) < 1e-4
                tried += len(seen)
        assert tried > 9


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_folders_with_a_tower_and_the_layer_draft_by_default(kind: str, tmp_path: Path) -> None:
    made = write_made(kind, tmp_path)
    assert made.oracle is not None
    inner = made.oracle.model.language_model
    layer = MtpLayer.of(cast(PreTrainedModel, SimpleNamespace(config=inner.config, model=inner)), torch.float32)
    file, config = tmp_path / "model.safetensors", {"model": str(tmp_path), "dtype": "float32", "device": "cpu"}
    save_file(load_file(file) | {name: t.contiguous().clone() for name, t in layer.tensors().items()}, str(file))
    requests, answers = made.requests(), list[dict[str, Answer]]()
    for more in (NONE, {}, ALWAYS):
        with closing(LocalEngine(flat_config(**config, **more, num_blocks=256, block_size=4))) as engine:
            assert engine.info.takes_images and engine.info.drafts == ("" if more == NONE else "mtp")
            answers.append(run(engine, requests, random.Random(1)))
            drafted = engine.engine.stats().draft_tokens
    assert drafted > 0
    bits = [{name: answer.bits() for name, answer in each.items()} for each in answers]
    assert bits[0] == bits[1] == bits[2]
