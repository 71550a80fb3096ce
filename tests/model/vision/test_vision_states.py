"""Images in prompts of models with recurrent states: rows of images that run again because a state stands before
them."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine_answers import run
from oracle import BACKENDS
from quire.core.config import flat_config
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.local import LocalEngine
from vision_models import VOCABULARY
from vision_prompts import Made, photograph, write_made

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")


def ending_in_an_image(made: Made, name: str, text: str, seed: int) -> Request:
    """A prompt whose last rows are those of an image."""
    prepared = [made.image_prompts.prepare(photograph(40, 56, seed))]
    whole = made.image_prompts.expand(text + made.image_prompts.image_token, prepared)
    ids, images = made.image_prompts.place(made.tokenizer.encode(whole), prepared, VOCABULARY)
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=4, ignore_eos=True)
    assert images[0].end == len(ids)
    return Request(id=name, prompt=tuple(ids), params=params, seed=3, arrival=0.0, images=images)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return write_made("qwen3_5", tmp_path_factory.mktemp("qwen3_5"))


def engine_of(folder: Path, **options: Any) -> LocalEngine:
    config = {"model": str(folder), "dtype": "float32", "device": "cpu", "num_blocks": 256, "block_size": 4}
    return LocalEngine(flat_config(**(config | options)))


@pytest.mark.parametrize("before", range(4))
def test_rows_of_an_image_run_again_with_its_features(before: int, made: Made) -> None:
    """The prompt is found whole, but for a state behind its last token; others took the room of its features."""
    first, other = (ending_in_an_image(made, name, "ab" + "c" * before, seed) for seed, name in enumerate("xy"))
    with closing(engine_of(made.folder, enable_prefix_caching=False)) as engine:
        want = run(engine, [first])["x"].bits()
    rows = max(first.images[0].rows, other.images[0].rows)
    with closing(engine_of(made.folder, encoder_cache_tokens=rows)) as engine:
        run(engine, [first])
        run(engine, [other])
        again = run(engine, [first])
        assert again["x"].bits() == want
        assert engine.engine.stats().prefix_hits > 0


def test_preempted_prompts_with_images_begin_again_at_a_snapshot(made: Made) -> None:
    alone = made.requests(max_tokens=40)
    requests = [replace(each, id=f"{each.id}-{i}") for i in range(2) for each in alone]
    with closing(engine_of(made.folder, enable_prefix_caching=False)) as engine:
        want = {each.id: run(engine, [each])[each.id].bits() for each in alone}
    with closing(engine_of(made.folder, num_blocks=64, max_num_batched_tokens=48, max_num_seqs=8)) as engine:
        got = run(engine, requests, random.Random(1))
        assert engine.engine.stats().preemptions
    assert [name for name, answer in got.items() if answer.bits() != want[name.rpartition("-")[0]]] == []
