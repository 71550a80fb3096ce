"""Images from end to end, on tiny models: `LLM` and a server give the same answers to the same images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import live_server
from image_files import png_url as png
from live_server import LiveServer
from oracle import BACKENDS
from quire import LLM, SamplingParams
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from real_server import real
from seeing import asked, image_part
from vision_models import make_vision_model
from vision_prompts import photograph

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
FAMILIES = ["llava", "qwen2_vl", "gemma4", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gemma3", "gemma4_moe"))]
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_blocks": 256, "device": "cpu"}
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    make_vision_model(request.param, made)
    return made


@contextmanager
def serving(folder: Path) -> Iterator[LiveServer]:
    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate.from_folder(folder, tokenizer)
    options = {name: value for name, value in OPTIONS.items() if name != "device"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_server, "text_tools", lambda: (tokenizer, template))
        with real(model=str(folder), **options) as server:
            yield server


def test_llm_and_server_say_the_same(folder: Path) -> None:
    one, two = photograph(40, 56, 0), photograph(33, 97, 1)
    parts = [{"type": "image", "image": one}, {"type": "text", "text": "and"}, {"type": "image", "image": two}]
    with LLM(str(folder), **OPTIONS) as llm:
        assert llm.info.takes_images
        [answer] = llm.chat([{"role": "user", "content": parts}], PARAMS, use_tqdm=False)
        [other] = llm.chat([{"role": "user", "content": parts[::-1]}], PARAMS, use_tqdm=False)
        [text] = llm.chat([{"role": "user", "content": "and"}], PARAMS, use_tqdm=False)
        [again] = llm.chat([{"role": "user", "content": parts}], PARAMS, use_tqdm=False)
    assert again.outputs[0].token_ids == answer.outputs[0].token_ids and again.num_cached_tokens > 0
    assert len(text.prompt_token_ids) < len(answer.prompt_token_ids) == len(other.prompt_token_ids)
    with serving(folder) as server:
        body = {"messages": asked(image_part(png(one)), "and", image_part(png(two))), "temperature": 0,
                "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}  # fmt: skip
        replies = [server.post("/v1/chat/completions", body) for _ in range(2)]
        assert [reply.status_code for reply in replies] == [200, 200], replies[0].text
        first, second = (reply.json() for reply in replies)
        assert first["choices"][0]["token_ids"] == answer.outputs[0].token_ids == second["choices"][0]["token_ids"]
        assert first["prompt_token_ids"] == answer.prompt_token_ids
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert first["usage"]["prompt_tokens"] == len(answer.prompt_token_ids)
        plain = {**body, "messages": [{"role": "user", "content": "and"}]}
        reply = server.post("/v1/chat/completions", plain).json()
        assert reply["choices"][0]["token_ids"] == text.outputs[0].token_ids


def test_beams_see_images(folder: Path) -> None:
    with serving(folder) as server:
        body = {"messages": asked(image_part(png(photograph(40, 56, 0))), "hm"), "max_tokens": 3, "n": 2,
                "use_beam_search": True}  # fmt: skip
        reply = server.post("/v1/chat/completions", body)
        assert reply.status_code == 200 and len(reply.json()["choices"]) == 2, reply.text
