"""Requests for vectors in engines that draft: they take no draft, and neither their bits nor those of texts change."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path

import pytest
import torch

from engine_answers import Answer, engine_of
from head_folders import write_eagle, write_medusa
from mtp_drafts import PROMPT
from mtp_models import write_mtp
from oracle import BACKENDS
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.core.speculation import HEADS
from quire.engine.local import LocalEngine
from quire.features.pooling.edge_embedding import pooled_request
from speculation_methods import METHODS, PYDOC, requests_of
from turns import turns

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
OWN = ("qwen3_5", "glm4_moe", "deepseek_v3")
SAID = SamplingParams(max_tokens=24, temperature=0.8, logprobs=2)
WAYS = (*OWN, "ngram", "suffix_tree", "self_int4", "draft_model", "medusa", "eagle3", "eagle_tree")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {name: tmp_path_factory.mktemp(name) for name in (*OWN, *HEADS)}
    for name in OWN:
        write_mtp(made[name], name, torch.bfloat16)
    write_medusa(made["medusa"], 256, 6144, own=False)
    write_eagle(made["eagle"], "eagle", 256, 6144)
    write_eagle(made["eagle3"], "eagle3", 256, 6144, 3072)
    return {name: str(path) for name, path in made.items()}


def both(engine: LocalEngine, vocab: int) -> tuple[dict[tuple[str, int], bytes], dict[str, bytes]]:
    """Bits of the texts, and vectors of the same prompts and of longer ones, in the same steps, trickling in."""
    texts, rng = requests_of(vocab, ""), random.Random(2)
    prompts = [request.prompt for request in texts] + [request.prompt[:9] * 6 for request in texts[:5]]
    names, waiting = dict[str, str](), list[Request](texts)
    for i, prompt in enumerate(prompts):
        request = pooled_request(engine.info, prompt)
        names[request.id] = f"v{i}"
        waiting.insert(rng.randint(0, len(waiting)), request)
    found, vectors = dict[tuple[str, int], Answer](), dict[str, bytes]()
    for _ in turns(lambda: waiting or engine.engine.has_work):
        for request in waiting[: rng.randint(0, 5)]:
            engine.submit(request)
            waiting.remove(request)
        report = engine.poll(0)
        for out in report.outputs if report else ():
            assert out.error is None, out.error
            if out.request_id in names:
                vectors[names[out.request_id]] = out.pooled
                continue
            answer = found.setdefault((out.request_id, out.index), Answer([], []))
            answer.tokens += out.tokens
            answer.logprobs += out.logprobs
    return {key: answer.bits() for key, answer in found.items()}, vectors


@pytest.mark.sampled(5)
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_vectors_take_no_draft_and_change_no_bit(way: str, adaptive: bool, folders: dict[str, str]) -> None:
    asked = {"method": "mtp"} if way in OWN else dict(METHODS[way])
    if asked["method"] == "draft_model":
        asked["model"] = PYDOC
    if asked["method"] in HEADS:
        asked["model"] = folders[asked["method"]]
    options = {"model": folders[way] if way in OWN else PYDOC, "max_num_batched_tokens": 32, "max_num_seqs": 12}
    vocab = 99 if way in OWN else 6144
    want = both(engine_of(**options, speculative_config='{"method": "none"}'), vocab)
    engine = engine_of(**options, speculative_config=json.dumps(asked | {"adaptive": adaptive}))
    got = both(engine, vocab)
    assert got[0] == want[0] and got[1] == want[1] and len(got[1]) == len({*got[1]}) == 23
    assert engine.engine.speculator is not None
    assert adaptive or engine.engine.speculator.totals.tokens > 0


def test_a_default_that_gives_way_is_logged(folders: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    options = {"model": folders["qwen3_5"]}
    with caplog.at_level(logging.INFO):
        assert not engine_of(**options).info.pooling.refused
    assert "layer for drafts is left out" not in caplog.text
    with caplog.at_level(logging.INFO):
        engine = engine_of(**options, context_parallel_size=1, pipeline_parallel_size=2)
        engine.close()
    assert engine.info.drafts == ""
    (line,) = (record.message for record in caplog.records if "is left out" in record.message)
    assert line.startswith("the model's own layer for drafts is left out: --pipeline-parallel-size: drafts of")


def test_prompts_of_vectors_leave_holes_that_drafts_know_of(tmp_path: Path) -> None:
    """A prompt that a vector was made of has no keys of the layer; a text with that prompt has the bits of any."""
    write_mtp(tmp_path, "glm4_moe", torch.bfloat16)
    texts = {}
    for first in (False, True):
        engine = engine_of(model=str(tmp_path), speculative_config='{"method": "mtp", "adaptive": false}')
        text = Request(id="t", prompt=PROMPT * 6, params=SAID, seed=3, arrival=0.0)
        if first:
            engine.submit(pooled_request(engine.info, text.prompt))
            while engine.engine.has_work:
                engine.poll(0)
        engine.submit(text)
        answer = Answer([], [])
        cached = 0
        while engine.engine.has_work:
            report = engine.poll(0)
            for out in report.outputs if report else ():
                answer.tokens, answer.logprobs = answer.tokens + out.tokens, answer.logprobs + out.logprobs
                cached = max(cached, out.cached_tokens)
        assert (cached > 0) == first
        texts[first] = answer.bits()
    assert texts[False] == texts[True]
