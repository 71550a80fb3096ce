"""Images that callers of `LLM` give, files of an allowed folder, and the options about both."""

from __future__ import annotations

import os
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire.core.config import flat_config
from quire.core.errors import BadRequest, ConfigError
from quire.core.media import USUAL_IMAGES, MediaConfig
from quire.core.params import SamplingParams
from quire.engine.engine_options import engine_config
from quire.engine.llm import LLM, PromptReader
from quire.engine.local import LocalEngine
from quire.engine.requests import EncodedPrompt, Seeds, make_request
from quire.features.images.edge_image_sources import file_of as read_file
from seeing import IMAGE, IMAGE_ID, ROWS, VOCAB, asked, file_of, folder, image_model_info, image_part, seeing, url_of
from stub_engine import StubEngine, stub_info

ONE = SamplingParams(max_tokens=2, temperature=0.0)


def reader(**options: Any) -> PromptReader:
    return PromptReader(flat_config(model=str(folder()), **options), image_model_info())


def stubbed(**options: Any) -> LLM:
    """An `LLM` over an engine that pretends."""
    llm = LLM.__new__(LLM)
    stub: Any = StubEngine(image_model_info())
    stub.run, stub._running, stub._closed = MethodType(LocalEngine.run, stub), False, False
    llm.config, llm.info, llm._engine = flat_config(model=str(folder()), **options), stub.info, stub
    llm._seeds, llm._reader = Seeds(0), PromptReader(llm.config, llm.info)
    return llm


def asked_of(llm: LLM) -> Any:
    stub: Any = llm.engine
    return stub.submitted[-1]


def test_every_kind_of_image_is_the_same_one(tmp_path: Path) -> None:
    data = file_of()
    path = tmp_path / "a.png"
    path.write_bytes(data)
    pixels = np.full((8, 8, 3), (200, 30, 60), np.uint8)
    image = Image.fromarray(pixels)
    kinds = [data, bytearray(data), path, str(path), image, pixels, url_of(data), image.convert("RGBA")]
    llm, keys = stubbed(), set()
    for kind in kinds:
        messages = [{"role": "user", "content": [{"type": "image", "image": kind}, {"type": "text", "text": "What?"}]}]
        [output] = llm.chat(messages, ONE, use_tqdm=False)
        assert output.prompt_token_ids.count(IMAGE_ID) == ROWS and max(output.prompt_token_ids) < VOCAB
        assert len(output.prompt_token_ids) == len(asked_of(llm).prompt)
        keys.add(asked_of(llm).images[0].key)
    llm.chat([*asked(image_part(url_of(data)), "What?")], ONE, use_tqdm=False)
    assert keys == {asked_of(llm).images[0].key}


def test_a_conversation_stays_as_it_was_given() -> None:
    messages = asked(image_part(), "What?")
    url = messages[0]["content"][0]["image_url"]["url"]
    llm = stubbed()
    first = llm.chat(messages, ONE, use_tqdm=False)[0].prompt_token_ids
    assert messages[0]["content"][0]["image_url"]["url"] == url
    assert llm.chat([messages, messages], ONE, use_tqdm=False)[1].prompt_token_ids == first
    assert (
        llm.chat([{"role": "user", "content": f"{IMAGE}?"}], ONE, use_tqdm=False)[0].prompt_token_ids.count(IMAGE_ID)
        == 0
    )


def test_generate_as_in_vllm() -> None:
    llm, image = stubbed(), Image.new("RGB", (9, 5), "red")
    prompt = {"prompt": f"<|user|>{IMAGE}What?{IMAGE}", "multi_modal_data": {"image": [image, file_of("blue")]}}
    [output] = llm.generate(prompt, ONE, use_tqdm=False)
    assert output.prompt == prompt["prompt"] and output.prompt_token_ids.count(IMAGE_ID) == 2 * ROWS
    assert [p.size for p in asked_of(llm).images] == [(5, 9), (8, 8)]
    ids, rows = output.prompt_token_ids, asked_of(llm).prompt
    images = {"image": [image, file_of("blue")]}
    [again] = llm.generate({"prompt_token_ids": ids, "multi_modal_data": images}, ONE, use_tqdm=False)
    assert again.prompt_token_ids == ids and asked_of(llm).prompt == rows
    [one] = llm.generate({"prompt": IMAGE, "multi_modal_data": {"image": image}}, ONE, use_tqdm=False)
    assert one.prompt_token_ids == [IMAGE_ID] * ROWS


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ({"prompt": "no mark", "multi_modal_data": {"image": file_of()}}, "prompt: 1 images came"),
        ({"prompt": IMAGE * 2, "multi_modal_data": {"image": file_of()}}, "for 2"),
        ({"prompt": IMAGE, "multi_modal_data": {"video": []}}, "only images"),
        ({"prompt": IMAGE, "multi_modal_data": [file_of()]}, "only images"),
        ({"prompt_token_ids": [5], "multi_modal_data": {"image": file_of()}}, "prompt_token_ids: "),
        ({"prompt": IMAGE, "multi_modal_data": {"image": b"no image"}}, r"multi_modal_data.image\[0\]: "),
        ({"prompt": IMAGE, "multi_modal_data": {"image": "/no/such/file"}}, "No such file"),
        ({"prompt": IMAGE, "multi_modal_data": {"image": 5}}, "a int is no image"),
        ({"prompt": IMAGE, "multi_modal_data": {"image": np.zeros((4, 4, 3))}}, "uint8"),
        ({"prompt": IMAGE, "multi_modal_data": {"image": np.zeros((4, 4, 2), np.uint8)}}, "uint8"),
        ({"prompt": IMAGE, "multi_modal_data": {"image": np.zeros((0, 4, 3), np.uint8)}}, "uint8"),
        ({"prompt": IMAGE, "multi_modal_data": {"image": "https://a.example/b.png"}}, "nothing is fetched"),
        ({"prompt": IMAGE, "multi_modal_data": {"image": "file:///etc/passwd"}}, "allowed-local-media-path"),
        ({"prompt": IMAGE * 17, "multi_modal_data": {"image": [file_of()] * 17}}, "limit-mm-per-prompt"),
        ({"prompt": "a", "images": []}, "need prompt"),
    ],
)
def test_what_generate_refuses(prompt: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        reader().read(prompt)


@pytest.mark.parametrize("kind", ["image_url", "image"])
def test_chat_fetches_nothing_and_says_what_to_give(kind: str) -> None:
    url, llm = "https://a.example/b.png", stubbed()
    part = image_part(url) if kind == "image_url" else {"type": "image", "image": url}
    with pytest.raises(BadRequest) as caught:
        llm.chat(asked(part, "What?"), ONE, use_tqdm=False)
    assert caught.value.param == f"messages[0].content[0].{'image_url.url' if kind == 'image_url' else 'image'}"
    for told in ("PIL image", "data: URL", "--allow-media-url"):
        assert told in caught.value.message


def test_limits_hold_for_objects_too() -> None:
    small = reader(max_image_pixels=15)
    for given in (Image.new("RGB", (4, 4)), np.zeros((4, 4, 3), np.uint8), file_of(size=(4, 4))):
        with pytest.raises(BadRequest, match="pixels"):
            small.read({"prompt": IMAGE, "multi_modal_data": {"image": given}})
    with pytest.raises(BadRequest, match="only generate and chat"):
        stubbed().beam_search({"prompt": IMAGE, "multi_modal_data": {"image": file_of()}}, _beams())


def _beams() -> Any:
    from quire.engine.beam import BeamSearchParams

    return BeamSearchParams(beam_width=2, max_tokens=2)


def test_a_model_without_images_refuses_them() -> None:
    plain = PromptReader(flat_config(model=str(folder())), stub_info(folder=str(folder()), vocab_size=VOCAB))
    with pytest.raises(BadRequest, match="this model takes no images"):
        plain.read({"prompt": IMAGE, "multi_modal_data": {"image": file_of()}})


def test_ids_beyond_the_vocabulary_are_rows_of_images_alone() -> None:
    _, encoded = reader().read({"prompt": f"a{IMAGE}b", "multi_modal_data": {"image": file_of()}})
    info = image_model_info()
    request = make_request(info, encoded, ONE, request_id="a", seed=0)
    assert request.images == encoded.images and list(request.prompt) == list(encoded.ids)
    ids = list(encoded.ids)
    moved = [*ids[:1], 9, *ids[1:]]
    for wrong in (
        EncodedPrompt(ids),
        EncodedPrompt(moved, encoded.images),
        EncodedPrompt([*ids, VOCAB], encoded.images),
    ):
        with pytest.raises(BadRequest, match=r"^prompt: "):
            make_request(info, wrong, ONE, request_id="a", seed=0)
    with pytest.raises(BadRequest, match="takes no images"):
        make_request(stub_info(vocab_size=VOCAB), encoded, ONE, request_id="a", seed=0)


def test_files_of_the_allowed_folder_alone(tmp_path: Path) -> None:
    allowed, outside = tmp_path / "allowed", tmp_path / "outside"
    (allowed / "deep").mkdir(parents=True)
    outside.mkdir()
    data = file_of()
    for place in (allowed / "a b.png", allowed / "deep" / "c.png", outside / "d.png"):
        place.write_bytes(data)
    (allowed / "inner").symlink_to(allowed / "deep" / "c.png")
    (allowed / "link").symlink_to(outside / "d.png")
    (allowed / "folder").symlink_to(outside)
    os.mkfifo(allowed / "pipe")
    media = MediaConfig(allowed_local_media_path=str(allowed))
    for good in ("a%20b.png", "deep/c.png", "deep/../deep/c.png", "inner"):
        assert read_file(f"file://{allowed}/{good}", "url", media) == data
    assert read_file(f"file://localhost{allowed}/inner", "url", media) == data
    for bad in (f"{outside}/d.png", f"{allowed}/../outside/d.png", f"{allowed}/link", f"{allowed}/folder/d.png",
                f"{allowed}/%2e%2e/outside/d.png", f"{allowed}", f"{allowed}/deep", f"{allowed}/pipe",
                f"{allowed}/missing", f"{allowed}/%00", f"elsewhere{allowed}/a"):  # fmt: skip
        with pytest.raises(BadRequest, match=r"^url: ") as caught:
            read_file(f"file://{bad}", "url", media)
        assert str(outside) not in caught.value.message
    with pytest.raises(BadRequest, match="max-image-bytes"):
        read_file(
            f"file://{allowed}/inner", "url", MediaConfig(allowed_local_media_path=str(allowed), max_image_bytes=9)
        )


def test_files_through_a_server(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(file_of())
    with seeing(allowed_local_media_path=str(tmp_path)) as server:
        body = {"messages": asked(image_part(f"file://{tmp_path}/a.png")), "max_tokens": 1}
        assert server.post("/v1/chat/completions", body).status_code == 200
        body["messages"] = asked(image_part("file:///etc/passwd"))
        reply = server.post("/v1/chat/completions", body)
        assert reply.status_code == 400 and "no such file in the allowed folder" in reply.text


def test_how_many_is_spelled_as_in_vllm() -> None:
    for given, count in {"image=4": 4, '{"image": 4}': 4, "image=4,video=0": 4, '{"video": 0}': USUAL_IMAGES}.items():
        assert MediaConfig(limit_mm_per_prompt=given).max_images == count
    assert engine_config({"limit_mm_per_prompt": {"image": 2}}).media.max_images == 2
    for wrong in ("4", "image=-1", "image=x", "video=1", '{"image": true}', '{"image"', "image=99999999999", ""):
        with pytest.raises(ConfigError, match="--limit-mm-per-prompt"):
            engine_config({"limit_mm_per_prompt": wrong})
    for name, value in {"max_image_bytes": 1, "max_image_pixels": 0, "mm_processor_cache_gb": -1.0}.items():
        with pytest.raises(ConfigError):
            engine_config({name: value})


def test_what_is_kept_is_bounded() -> None:
    from quire.features.images.edge_image_sources import ImageSource

    kept = reader(mm_processor_cache_gb=100e-9).preparer  # two images of 48 bytes
    files = [file_of(color) for color in ("red", "lime", "blue")]
    for data in (*files, files[2], files[1]):
        kept.prepare(ImageSource("a", data), alone=True)
    assert kept.hits == 2 and len(kept._kept) == 2
    kept.prepare(ImageSource("a", files[0]), alone=True)
    assert kept.hits == 2
    none = reader(mm_processor_cache_gb=0.0).preparer
    for _ in range(2):
        none.prepare(ImageSource("a", files[0]), alone=True)
    assert none.hits == 0 and not none._kept
