"""Images as tiles and whole (LFM2-VL): sizes, cuts and words of transformers' processor, which needs torchvision.

Its module is imported with an empty torchvision, and images are resized by Pillow in its place, so that all else is
its own code.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from image_families import backend
from image_files import sample_image
from quire.core.errors import BadRequest, ModelError
from quire.images.processor_config import SettingFields
from quire.images.prompt import ImagePrompts, open_image_prompts
from quire.images.tiles import GridAndWhole

SETTINGS: dict[str, Any] = {"encoder_patch_size": 7, "downsample_factor": 2, "tile_size": 28, "min_tiles": 2,
                            "max_tiles": 6, "min_image_tokens": 2, "max_image_tokens": 8,
                            "max_pixels_tolerance": 1.5}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "usual": {},
    "one tile": {"do_image_splitting": False},
    "no whole image": {"use_thumbnail": False},
    "large tiles": {"tile_size": 42, "max_tiles": 9, "max_image_tokens": 16},
}
SIZES = ((64, 64), (40, 211), (130, 30), (14, 14), (28, 56), (300, 310), (29, 83))
"""Height and width of images."""


def by_pillow(self: Any, image: torch.Tensor, size: Any, resample: Any = None, **more: Any) -> torch.Tensor:
    """Resize a batch uint8 [images, 3, height, width]."""
    found = [
        Image.fromarray(one.permute(1, 2, 0).numpy()).resize((size.width, size.height), Image.Resampling(resample))
        for one in image
    ]
    return torch.stack([torch.from_numpy(np.asarray(one).copy()).permute(2, 0, 1) for one in found])


@pytest.fixture(scope="module")
def theirs() -> Any:
    """The module of transformers' processor of images."""
    fakes = {name: ModuleType(name) for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")}
    fakes["torchvision.transforms.v2"].functional = SimpleNamespace(InterpolationMode=None)  # type: ignore[attr-defined]
    with patch.dict(sys.modules, fakes):
        return import_module("transformers.models.lfm2_vl.image_processing_lfm2_vl")


def cut_by_transformers(theirs: Any, image: Image.Image, told: dict[str, Any]) -> tuple[list[Any], int, int, list[int]]:
    """Tiles uint8 [3, height, width], rows and columns of them, and the size of the whole image."""
    kind = theirs.Lfm2VlImageProcessor
    names = ("downsample_factor", "min_tiles", "max_tiles", "use_thumbnail", "min_image_tokens", "max_image_tokens",
             "encoder_patch_size", "tile_size", "max_pixels_tolerance")  # fmt: skip
    facts = {name: told.get(name, getattr(kind, name)) for name in names}
    if not told.get("do_image_splitting", True):
        facts |= {"min_tiles": 1, "max_tiles": 1}
    batch = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None]
    with patch.object(kind.__mro__[1], "resize", by_pillow):
        tiles, rows, columns, sizes = kind.resize_and_split(kind.__new__(kind), batch, resample=2, **facts)
    return list(tiles[0]), rows[0], columns[0], sizes[0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_cuts_are_those_of_transformers(name: str, size: tuple[int, int], theirs: Any) -> None:
    told = SETTINGS | CASES[name]
    image = sample_image(*size, 1)
    wanted, rows, columns, whole = cut_by_transformers(theirs, image, told)
    cut = GridAndWhole(SettingFields(told, "file"))(image, True)
    found = [*cut.tiles, *([] if cut.whole is None else cut.whole)]
    assert len(found) == len(wanted)
    for ours, other in zip(found, wanted, strict=True):
        assert np.array_equal(ours, other.permute(1, 2, 0).numpy())
    assert cut.split == ((rows, columns) if rows * columns > 1 else (0, 0))
    assert rows * columns > 1 or list(cut.size) == whole


TOKENS = ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", "<|end|>",
          *(f"<|img_row_{i}_col_{j}|>" for i in range(1, 7) for j in range(1, 7))]  # fmt: skip


def opened(folder: Path, **told: Any) -> ImagePrompts:
    """What a model with these settings makes of images."""
    folder.mkdir(exist_ok=True)
    backend(TOKENS).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "lfm2_vl"}))
    image = {"image_processor_type": "Lfm2VlImageProcessorFast", **SETTINGS, **told}
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": image}))
    from quire.text.tokenizer import Tokenizer

    found = open_image_prompts(folder, Tokenizer.from_folder(folder))
    assert found is not None
    return found


@pytest.mark.parametrize("name", CASES)
def test_words_are_those_of_transformers(name: str, theirs: Any, tmp_path: Path) -> None:
    from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

    told = SETTINGS | CASES[name]
    facts = {key: told.get(key, getattr(theirs.Lfm2VlImageProcessor, key))
             for key in ("tile_size", "downsample_factor", "encoder_patch_size", "use_thumbnail")}  # fmt: skip
    processor: Any = Lfm2VlProcessor.__new__(Lfm2VlProcessor)
    processor.image_processor = SimpleNamespace(**facts)
    for role, token in zip(("image", "image_start", "image_end", "image_thumbnail"), TOKENS, strict=False):
        setattr(processor, f"{role}_token", token)
    prompts = opened(tmp_path, **CASES[name])
    for size in SIZES:
        image = sample_image(*size, 1)
        _, rows, columns, whole = cut_by_transformers(theirs, image, told)
        inputs = {"image_rows": [rows], "image_cols": [columns], "image_sizes": [whole]}
        wanted = processor.replace_image_token(inputs, 0, use_image_special_tokens=True)
        prepared = prompts.prepare(image)
        assert prepared.text == wanted
        assert prepared.rows == wanted.count("<image>") <= prompts.most_rows
        assert all(part.shape[0] == 1 for part in prepared.parts[1:]) and len(prepared.parts) <= 2


def test_the_whole_image_is_one_by_itself(tmp_path: Path) -> None:
    prompts = opened(tmp_path)
    prepared = prompts.prepare(sample_image(300, 310, 1))
    tiles, whole = prepared.parts
    assert tiles.shape == (4, 28, 28) and tiles.rows == 16 and whole.shape[0] == 1 and whole.rows == 4
    assert tiles.key != whole.key


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 400), st.integers(1, 400))
def test_no_image_is_larger_than_said(height: int, width: int) -> None:
    cutter = GridAndWhole(SettingFields(SETTINGS, "file"))
    try:
        high, wide = cutter.size((height, width))
    except BadRequest as error:
        assert "too thin" in error.message
        return
    assert high % 14 == wide % 14 == 0 and 0 < high * wide <= cutter.most_pixels


@pytest.mark.parametrize("told", [{"tile_size": 30}, {"min_tiles": 7}])
def test_settings_that_do_not_fit_are_refused(told: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=f"file: {next(iter(told))} is"):
        GridAndWhole(SettingFields(SETTINGS | told, "file"))
