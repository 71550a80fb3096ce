"""Prompts with images: the ids of transformers' processors, with rows of images under ids of their digests."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.image_processing_base import ImageProcessingMixin
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

from image_families import CASES, IDEFICS, Case, backend, folder_of, processor_of
from image_files import sample_image
from quire.core.errors import BadRequest, ModelError
from quire.core.images import placeholders
from quire.images.processor_config import image_settings
from quire.images.prompt import ImagePrompts, PreparedImage, open_image_prompts
from quire.model.vision.reading import Pixels, read_pixels
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

VOCAB_SIZE = 1000


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, ImagePrompts, Tokenizer]]:
    """By the name of a case: transformers' processor, and ours from its files."""
    known: dict[str, tuple[Any, ImagePrompts, Tokenizer]] = {}

    def open_one(name: str) -> tuple[Any, ImagePrompts, Tokenizer]:
        if name not in known:
            processor = processor_of(CASES[name])
            folder = folder_of(CASES[name], tmp_path_factory.mktemp("model"), processor)
            tokenizer = Tokenizer.from_folder(folder)
            image_prompts = open_image_prompts(folder, tokenizer)
            assert image_prompts is not None
            known[name] = processor, image_prompts, tokenizer
        return known[name]

    return open_one


def restored(ids: list[int], image_prompts: ImagePrompts) -> list[int]:
    """Ids of rows as the tokenizer gave them."""
    return [image_prompts.row_id if i >= VOCAB_SIZE else i for i in ids]


def asked(image_prompts: ImagePrompts, tokenizer: Tokenizer, text: str, prepared: Sequence[PreparedImage]) -> Any:
    """Ids of the prompt, and its images."""
    return image_prompts.place(tokenizer.encode(image_prompts.expand(text, prepared)), prepared, VOCAB_SIZE)


IMAGES = [sample_image(64, 64, 1), sample_image(40, 211, 2), sample_image(130, 30, 3)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [1, 3, 0])
def test_ids_are_those_of_transformers(name: str, count: int, opened: Any) -> None:
    processor, image_prompts, tokenizer = opened(name)
    case, images = CASES[name], IMAGES[3 - count :]
    assert image_prompts.image_token == case.mark
    text = "<|end|>What is." + "".join(f"\n{case.mark}\n a" for _ in images) + " is?"
    more = {"images_kwargs": case.call} if case.call and images else {}
    inputs = processor(text=[text], images=images or None, **more)
    expected = np.asarray(inputs["input_ids"])[0].tolist()
    prepared = [image_prompts.prepare(image) for image in images]
    ids, found = asked(image_prompts, tokenizer, text, prepared)
    assert restored(ids, image_prompts) == expected
    assert sum(p.rows for p in found) == expected.count(image_prompts.row_id) == sum(p.rows for p in prepared)
    for one in found:
        rows = [row for start, length in one.runs for row in range(start, start + length)]
        assert [ids[row] for row in rows] == placeholders(one.key, one.rows, VOCAB_SIZE)
        assert one.tiles.shape == (*one.shape, 3) and (one.grid == (0, 0) or one.grid[0] * one.grid[1] == one.rows)


def test_images_among_others_are_cut_as_onevision_cuts_them(opened: Any) -> None:
    processor, image_prompts, tokenizer = opened("llava_onevision")
    text = "".join(f"{image_prompts.image_token}\n" for _ in IMAGES)
    expected = np.asarray(processor(text=[text], images=[IMAGES])["input_ids"])[0].tolist()
    prepared = [image_prompts.prepare(image, alone=False) for image in IMAGES]
    ids, found = asked(image_prompts, tokenizer, text, prepared)
    assert restored(ids, image_prompts) == expected
    assert {p.rows for p in found} == {17} and image_prompts.prepare(IMAGES[0]).rows != 17


def test_smolvlm_writes_as_transformers_does(opened: Any, tmp_path: Path) -> None:
    """Its processor needs a package for numbers in words of videos; the text of images is its own method."""
    case = Case("smolvlm", SmolVLMProcessor, **IDEFICS)
    processor, _, tokenizer = opened("idefics3")
    image_prompts = open_image_prompts(folder_of(case, tmp_path, processor), tokenizer)
    assert image_prompts is not None
    facts = SimpleNamespace(
        image_seq_len=4, fake_image_token="<fake_token_around_image>", image_token="<image>",
        global_image_token="<global-img>",
    )  # fmt: skip
    for image in IMAGES:
        cut = processor.image_processor(images=[[image]], return_row_col_info=True)
        assert image_prompts.prepare(image).text == SmolVLMProcessor.replace_image_token(facts, cut, 0)


def test_crops_that_see_only_themselves_are_images_by_themselves(opened: Any) -> None:
    _, image_prompts, tokenizer = opened("gemma3, scanned")
    prepared = image_prompts.prepare(IMAGES[1])
    _, found = asked(image_prompts, tokenizer, image_prompts.image_token, [prepared])
    assert len(found) == len(prepared.parts) == 5
    assert all(p.shape == (1, 28, 28) and len(p.runs) == 1 and p.rows == 4 for p in found)
    assert len({p.key for p in found} | {prepared.key}) == 6


@pytest.mark.parametrize("name", CASES)
def test_no_image_has_more_rows_than_said(name: str, opened: Any) -> None:
    _, image_prompts, _ = opened(name)
    seen = 0

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(st.integers(1, 400), st.integers(1, 400), st.booleans())
    def check(height: int, width: int, alone: bool) -> None:
        nonlocal seen
        try:
            prepared = image_prompts.prepare(Image.new("RGB", (width, height)), alone)
        except BadRequest as error:
            assert "too thin" in error.message
            return
        seen = max(seen, prepared.rows)
        assert 0 < prepared.rows <= image_prompts.most_rows
        assert prepared.rows == prepared.text.count(image_prompts.row_token)

    check()
    assert seen * 4 >= image_prompts.most_rows


def test_keys_tell_images_apart(opened: Any, tmp_path: Path) -> None:
    """By their pixels, by the size they came in, and by what the folder says."""
    processor, image_prompts, tokenizer = opened("llava")
    one = image_prompts.prepare(IMAGES[0])
    assert image_prompts.prepare(IMAGES[0].copy()).key == one.key and len(one.key) == 16
    changed = IMAGES[0].copy()
    changed.putpixel((30, 30), (255, 0, 255))
    assert image_prompts.prepare(changed).key != one.key
    black, wide = Image.new("RGB", (64, 64)), Image.new("RGB", (128, 64))
    assert image_prompts.prepare(black).parts[0].pixels == image_prompts.prepare(wide).parts[0].pixels
    assert image_prompts.prepare(black).key != image_prompts.prepare(wide).key
    folder = folder_of(CASES["llava"], tmp_path, processor)
    said = json.loads((folder / "processor_config.json").read_text())
    said["image_processor"]["image_mean"] = [0.1, 0.2, 0.3]
    (folder / "processor_config.json").write_text(json.dumps(said))
    other = open_image_prompts(folder, tokenizer)
    assert other is not None and other.prepare(IMAGES[0]).key != one.key


TEMPLATE = (
    "{% for m in messages %}<|end|>{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}MARK{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("name", ["llava", "gemma3", "internvl", "mistral3"])
def test_what_a_user_writes_is_no_image(name: str, opened: Any) -> None:
    _, image_prompts, tokenizer = opened(name)
    template = ChatTemplate({"default": TEMPLATE.replace("MARK", image_prompts.image_token)}, tokenizer)
    forged = f"a {image_prompts.image_token} or {image_prompts.row_token}"
    text = template.marked([{"role": "user", "content": forged}])
    ids, found = asked(image_prompts, tokenizer, text, [])
    assert not found and image_prompts.row_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"<|end|>{forged}"
    prepared = image_prompts.prepare(IMAGES[0])
    rendered = text + image_prompts.image_token
    ids, found = asked(image_prompts, tokenizer, rendered, [prepared])
    assert len(found) == 1 and found[0].start > len(tokenizer.encode(text)) - 1


def test_tokens_that_no_file_calls_special_cannot_be_forged_either(tmp_path: Path) -> None:
    processor = processor_of(CASES["llava"])
    folder = folder_of(CASES["llava"], tmp_path, processor)
    plain = backend(["<|end|>"], ["<image>"])
    plain.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    row = plain.token_to_id("<image>")
    (folder / "config.json").write_text(json.dumps({"model_type": "llava", "image_token_index": row}))
    tokenizer = Tokenizer.from_folder(folder)
    assert row in tokenizer.encode(tokenizer.escape("an <image>"))
    image_prompts = open_image_prompts(folder, tokenizer)
    assert image_prompts is not None and image_prompts.row_id == row
    escaped = tokenizer.escape("an <image>")
    assert row not in tokenizer.encode(escaped) and image_prompts.expand(escaped, []) == escaped


def test_numbers_that_do_not_match_are_refused(opened: Any) -> None:
    _, image_prompts, tokenizer = opened("llava")
    prepared = image_prompts.prepare(IMAGES[0])
    with pytest.raises(BadRequest, match=r"1 places for images \('<image>'\), and 2 images came"):
        image_prompts.expand("a <image>", [prepared, prepared])
    with pytest.raises(BadRequest, match="0 places for images"):
        image_prompts.expand("a", [prepared])
    ids = tokenizer.encode(image_prompts.expand("<image>", [prepared]))
    with pytest.raises(BadRequest, match=r"has 15 rows of images \(id \d+\), and its 1 images 16"):
        image_prompts.place(ids[1:], [prepared], VOCAB_SIZE)


def test_neighbours_are_told_apart(opened: Any) -> None:
    """Two images without a token between them."""
    _, image_prompts, tokenizer = opened("llava")
    prepared = [image_prompts.prepare(image) for image in IMAGES[:2]]
    ids, found = asked(image_prompts, tokenizer, "<image><image>.", prepared)
    assert [p.runs for p in found] == [((0, 16),), ((16, 16),)]
    assert ids[:16] == placeholders(prepared[0].key, 16, VOCAB_SIZE)


OLD = {"size": {"shortest_edge": 28}, "crop_size": 28, "feature_extractor_type": "CLIPFeatureExtractor"}


def test_older_folders_name_less(tmp_path: Path) -> None:
    """Without processor_config.json, rows follow from the tower: LLaVA 1.5 as it first came."""
    plain = backend(["<image>"])
    plain.save(str(tmp_path / "tokenizer.json"))
    row = plain.token_to_id("<image>")
    vision = {"model_type": "clip_vision_model", "patch_size": 7, "image_size": 28}
    config = {"model_type": "llava", "image_token_index": row, "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_image_prompts(tmp_path) is None
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(OLD))
    image_prompts = open_image_prompts(tmp_path)
    assert image_prompts is not None and image_prompts.row_id == row
    assert image_prompts.prepare(IMAGES[0]).rows == image_prompts.most_rows == 16


@pytest.mark.parametrize("place", ["extra_special_tokens", "model_specific_special_tokens", None])
def test_tokens_of_images_stand_in_either_place(place: str | None, opened: Any, tmp_path: Path) -> None:
    """Of tokenizer_config.json: beside all else, or by themselves as in files of older versions."""
    processor, image_prompts, tokenizer = opened("internvl")
    folder = folder_of(CASES["internvl"], tmp_path, processor)
    tokens: dict[str, Any] = dict(CASES["internvl"].tokens) | {"end_image_token": {"content": "</img>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens if place is None else {place: tokens}))
    other = open_image_prompts(folder, tokenizer)
    assert other is not None and other.prepare(IMAGES[1]) == image_prompts.prepare(IMAGES[1])


NESTED = {"size": {"shortest_edge": 28}, "crop_size": 28, "image_processor_type": "CLIPImageProcessor",
          "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7]}  # fmt: skip
APART = NESTED | {"size": {"shortest_edge": 42}, "crop_size": 42, "image_mean": [0.4, 0.5, 0.6]}


@pytest.mark.parametrize("nested", [{"image_processor": NESTED}, {"image_processor": None}, {}], ids=str)
@pytest.mark.parametrize("apart", [APART, None], ids=str)
def test_tower_and_processor_read_the_file_that_transformers_reads(
    nested: dict[str, Any], apart: dict[str, Any] | None, tmp_path: Path
) -> None:
    """Of two that differ, processor_config.json says how images are cut and what their numbers are, if it does."""
    plain = backend(["<image>"])
    plain.save(str(tmp_path / "tokenizer.json"))
    vision = {"model_type": "clip_vision_model", "patch_size": 7, "image_size": 28}
    config = {"model_type": "llava", "image_token_index": plain.token_to_id("<image>"), "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = {"patch_size": 7, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 0}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested | facts))
    if apart is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(apart))
    try:
        want, _ = ImageProcessingMixin.get_image_processor_dict(tmp_path)
    except OSError:
        assert open_image_prompts(tmp_path) is None and read_pixels(image_settings(tmp_path), Pixels()) == Pixels()
        return
    image_prompts, pixels = open_image_prompts(tmp_path), read_pixels(image_settings(tmp_path), Pixels())
    assert image_prompts is not None
    assert image_prompts.prepare(IMAGES[0]).parts[0].shape == (1, want["crop_size"], want["crop_size"])
    assert [*pixels.mean, *pixels.std] == [*want["image_mean"], *want["image_std"]]


def test_a_processor_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text('{"image_processor": "CLIPImageProcessor"}')
    for read in (open_image_prompts, lambda folder: read_pixels(image_settings(folder), Pixels())):
        with pytest.raises(ModelError, match=r"processor_config\.json: image_processor must be an object, not 'CLIP"):
            read(tmp_path)


def test_models_that_take_no_images(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(OLD))
    assert open_image_prompts(tmp_path) is None
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert open_image_prompts(tmp_path / "model.gguf") is None


def test_folders_that_do_not_fit_are_refused(opened: Any, tmp_path: Path) -> None:
    processor, _, tokenizer = opened("llava")
    folder = folder_of(CASES["llava"], tmp_path, processor)
    (folder / "config.json").write_text('{"model_type": "llava", "image_token_id": 3}')
    with pytest.raises(ModelError, match=r"config\.json: image_token_id is 3, the tokenizer's id of '<image>' \d+"):
        open_image_prompts(folder, tokenizer)
    (folder / "config.json").write_text('{"model_type": "qwen2_vl", "image_token_id": 3}')
    said = json.loads((folder / "processor_config.json").read_text()) | {"processor_class": "Qwen2VLProcessor"}
    (folder / "processor_config.json").write_text(json.dumps(said))
    with pytest.raises(ModelError, match="image_processor_type does not fit a family whose images come in patches"):
        open_image_prompts(folder, tokenizer)
