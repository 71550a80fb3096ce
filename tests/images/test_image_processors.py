"""Images are cut as transformers' processors cut them: after the same rescaling and normalizing, the same numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from transformers.image_processing_backends import PilBackend
from transformers.image_transforms import convert_to_rgb
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    convert_image_to_patches,
    pad_along_first_dim,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from image_files import sample_image
from quire.core.errors import BadRequest, ModelError
from quire.images import resizing
from quire.images.decoding import to_rgb
from quire.images.one_tile import Whole
from quire.images.processor_config import SettingFields, Size
from quire.images.processors import make_processor

SIZES = ((1, 1), (300, 7), (7, 300), (64, 64), (427, 640), (640, 427), (50, 131), (29, 28))
"""Height and width of images."""
GRID = [[56, 28], [28, 56], [56, 56], [84, 28], [28, 84]]


@dataclass(frozen=True)
class Case:
    """A processor of transformers and its settings; `alone`: the image is the only one of its prompt."""

    kind: type[PilBackend]
    settings: dict[str, Any] = field(default_factory=dict)
    alone: bool = True


SQUARE = {"height": 28, "width": 28}
CASES = {
    "clip": Case(CLIPImageProcessorPil, {"size": {"shortest_edge": 28}, "crop_size": SQUARE}),
    "clip, larger crop": Case(CLIPImageProcessorPil, {"size": {"shortest_edge": 21}, "crop_size": 30}),
    "clip, odd crop": Case(CLIPImageProcessorPil, {"size": {"shortest_edge": 33}, "crop_size": 20, "resample": 2}),
    "clip, two edges": Case(
        CLIPImageProcessorPil, {"size": {"shortest_edge": 28, "longest_edge": 50}, "crop_size": 28}
    ),
    "clip, within": Case(CLIPImageProcessorPil, {"size": {"max_height": 280, "max_width": 350}, "crop_size": 28}),
    "siglip": Case(SiglipImageProcessorPil, {"size": SQUARE}),
    "siglip, nearest": Case(SiglipImageProcessorPil, {"size": SQUARE, "resample": 0}),
    "llava": Case(LlavaImageProcessorPil, {"size": {"shortest_edge": 28}, "crop_size": SQUARE}),
    "llava, padded": Case(LlavaImageProcessorPil, {"size": {"shortest_edge": 28}, "crop_size": SQUARE, "do_pad": True}),
    "llava-next": Case(
        LlavaNextImageProcessorPil, {"size": {"shortest_edge": 28}, "crop_size": SQUARE, "image_grid_pinpoints": GRID}
    ),
    "onevision": Case(LlavaOnevisionImageProcessorPil, {"size": SQUARE, "image_grid_pinpoints": GRID}),
    "onevision, several": Case(
        LlavaOnevisionImageProcessorPil, {"size": SQUARE, "image_grid_pinpoints": GRID}, alone=False
    ),
    "qwen2-vl": Case(
        Qwen2VLImageProcessorPil,
        {"patch_size": 7, "merge_size": 2, "size": {"shortest_edge": 14 * 14 * 4, "longest_edge": 14 * 14 * 60}},
    ),
    "qwen2-vl, pixels": Case(
        Qwen2VLImageProcessorPil, {"patch_size": 8, "min_pixels": 16 * 16 * 2, "max_pixels": 16 * 16 * 9}
    ),
    "gemma3": Case(Gemma3ImageProcessorPil, {"size": SQUARE}),
    "gemma3, scanned": Case(
        Gemma3ImageProcessorPil,
        {"size": SQUARE, "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16, "pan_and_scan_max_num_crops": 4,
         "pan_and_scan_min_ratio_to_activate": 1.2},
    ),
    "gemma4": Case(Gemma4ImageProcessorPil, {"patch_size": 4, "max_soft_tokens": 70}),
    "gemma4, larger squares": Case(
        Gemma4ImageProcessorPil, {"patch_size": 2, "pooling_kernel_size": 4, "max_soft_tokens": 140, "resample": 2}
    ),
    "pixtral": Case(PixtralImageProcessorPil, {"size": {"longest_edge": 100}, "patch_size": 8}),
    "pixtral, within": Case(PixtralImageProcessorPil, {"size": {"height": 60, "width": 90}, "patch_size": 14}),
    "idefics3": Case(
        Idefics3ImageProcessorPil, {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 28}}
    ),
    "idefics3, whole": Case(
        Idefics3ImageProcessorPil,
        {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 28}, "do_image_splitting": False},
    ),
    "smolvlm": Case(SmolVLMImageProcessorPil, {"size": {"longest_edge": 75}, "max_image_size": {"longest_edge": 25}}),
    "internvl": Case(
        GotOcr2ImageProcessorPil, {"size": SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 6}
    ),
    "internvl, at least": Case(
        GotOcr2ImageProcessorPil, {"size": SQUARE, "crop_to_patches": True, "min_patches": 3, "max_patches": 12}
    ),
    "internvl, whole": Case(GotOcr2ImageProcessorPil, {"size": {"height": 20, "width": 32}}),
}  # fmt: skip


def theirs(oracle: PilBackend, image: Image.Image, case: Case) -> NDArray[np.float32]:
    """What transformers gives the tower: [tiles, 3, height, width], or patches."""
    images = [image] if case.alone else [[image, image]]
    found = np.asarray(oracle(images=images, return_tensors="np")["pixel_values"], np.float32)
    if not case.alone or found.ndim == 5:
        found = found[0]
    return found


def normalized(oracle: PilBackend, tiles: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Our tiles behind transformers' rescaling and normalizing, [tiles, 3, height, width]; patches for Qwen and
    Gemma 4."""
    found = []
    for tile in tiles:
        scaled = oracle.rescale(np.moveaxis(tile, -1, 0), oracle.rescale_factor)
        if isinstance(oracle, Gemma4ImageProcessorPil):
            most = oracle.max_soft_tokens * oracle.pooling_kernel_size**2
            cut = convert_image_to_patches(scaled, oracle.patch_size)
            return pad_along_first_dim(cut, np.zeros((len(cut), 2)), most)[0][None]
        found.append(oracle.normalize(scaled, oracle.image_mean, oracle.image_std))
    if isinstance(oracle, Qwen2VLImageProcessorPil):
        facts = oracle.patch_size, oracle.merge_size, oracle.temporal_patch_size
        return np.asarray(oracle.patchify(found[0], *facts)[0], np.float32)
    return np.stack(found)


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_transformers(name: str) -> None:
    case = CASES[name]
    oracle = case.kind(**case.settings)
    ours = make_processor(SettingFields(json.loads(oracle.to_json_string()), "preprocessor_config.json"), "")
    refused = 0
    for seed, (height, width) in enumerate(SIZES):
        image = sample_image(height, width, seed)
        try:
            expected = theirs(oracle, image, case)
        except ValueError:
            refused += 1
            with pytest.raises(BadRequest, match=f"{width} x {height} pixels"):
                ours(image, case.alone)
            continue
        np.testing.assert_array_equal(normalized(oracle, ours(image, case.alone).tiles), expected, err_msg=str(image))
    assert refused <= 2


@pytest.mark.parametrize("kind", sorted({case.kind for case in CASES.values()}, key=lambda kind: kind.__name__))
def test_defaults_are_those_of_transformers(kind: type[PilBackend]) -> None:
    """A file that says nothing but the type."""
    oracle, image = kind(), sample_image(200, 333)
    ours = make_processor(SettingFields({"image_processor_type": kind.__name__}, "preprocessor_config.json"), "")
    np.testing.assert_array_equal(normalized(oracle, ours(image, True).tiles), theirs(oracle, image, Case(kind)))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGBA", "CMYK", "YCbCr", "HSV"])
def test_modes_become_rgb_as_in_transformers(mode: str) -> None:
    image = sample_image(31, 45)
    image.putalpha(sample_image(31, 45, 1).convert("L"))
    image = image.convert("P").convert("PA") if mode == "PA" else image.convert(mode)
    np.testing.assert_array_equal(np.asarray(to_rgb(image)), convert_to_rgb(image, return_numpy=True))
    if mode == "P":
        image.info["transparency"] = 7
        np.testing.assert_array_equal(np.asarray(to_rgb(image)), convert_to_rgb(image, return_numpy=True))


def test_colours_that_hold_their_transparency_are_laid_on_white_too() -> None:
    """TIFF's "RGBa"; transformers takes such an image for one without transparency."""
    image = sample_image(31, 45)
    image.putalpha(sample_image(31, 45, 1).convert("L"))
    expected = np.asarray(to_rgb(image)).astype(int)
    assert np.abs(np.asarray(to_rgb(image.convert("RGBa"))) - expected).max() <= 2


def test_only_the_middle_of_a_huge_image_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shorter side of 1 x 10,000 becomes 336: a thousand million pixels, of which 336 x 336 are wanted."""
    whole = Whole(SettingFields({}, ""), Size(shortest=336), crop=336)
    assert whole(sample_image(10_000, 1), True).size == whole(sample_image(1, 10_000), True).size == (336, 336)
    for height, width in ((300, 9), (9, 300), (80, 81)):
        image = sample_image(height, width)
        expected = whole(image, True).tiles.astype(int)
        with monkeypatch.context() as small:
            small.setattr(resizing, "MOST_PIXELS", 1000)
            assert np.abs(whole(image, True).tiles - expected).max() <= 1


def test_images_in_patches_may_be_bound_in_either_spelling() -> None:
    bounds = [{"min_pixels": 800, "max_pixels": 8000}, {"size": {"min_pixels": 800, "max_pixels": 8000}},
              {"size": {"shortest_edge": 800, "longest_edge": 8000}},
              {"size": {"shortest_edge": 9, "longest_edge": 99}, "min_pixels": 800, "max_pixels": 8000}]  # fmt: skip
    for said in bounds:
        processor = make_processor(SettingFields(said, ""), "Qwen2VLImageProcessorFast")
        assert (processor.least, processor.most) == (800, 8000)  # type: ignore[attr-defined]


WRONG = {
    "type": ({"image_processor_type": "NoImageProcessor"}, "'NoImageProcessor' is not known; known are CLIPImageProc"),
    "size": ({"size": {"edge": 3}}, "size is {'edge': 3}, not a size by height"),
    "huge": ({"size": 10**9}, "outside"),
    "word": ({"size": {"shortest_edge": "large"}}, "must be an integer, not 'large'"),
    "flag": ({"do_resize": "no"}, "do_resize must be true or false"),
    "mean": ({"image_mean": [1, 2]}, "image_mean must be three numbers"),
    "filter": ({"resample": 9}, r"resample is 9, outside \[0, 5\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_say_what_cannot_be_are_refused(name: str) -> None:
    said, reason = WRONG[name]
    with pytest.raises(ModelError, match=r"preprocessor_config\.json") as raised:
        make_processor(SettingFields(said, "preprocessor_config.json"), "CLIPImageProcessor")
    assert raised.match(reason)
