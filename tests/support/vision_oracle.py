"""transformers' features of images: what towers are held to, for every family and several sizes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.image_processing_utils import select_best_resolution

from oracle import backend
from quire.core.config import flat_config
from quire.core.images import PromptImage
from quire.model.build import Model, load_model
from quire.ops.arrays import to_torch
from vision_models import CONFIGS, LIKE_GEMMA4, PREPROCESSORS, make_vision_model

TILE = 32
DEEP = ("qwen3_vl", "qwen3_vl_moe")
QWEN = ("qwen2_vl", "qwen2_5_vl", *DEEP, "qwen3_5", "qwen3_5_moe")

SHAPES: dict[str, list[tuple[int, int, int]]] = {
    "llava": [(1, 56, 56)],
    "llava_siglip": [(1, 32, 32)],
    "llava_pixtral": [(1, 64, 64), (1, 32, 48), (1, 24, 64)],
    "qwen2_vl": [(1, 32, 48), (1, 16, 16), (1, 128, 112)],
    "qwen2_5_vl": [(1, 64, 48), (1, 48, 80), (1, 16, 64)],
    "qwen3_vl": [(1, 48, 48), (1, 32, 64), (1, 80, 16)],
    "qwen3_vl_moe": [(1, 32, 64)],
    "qwen3_5": [(1, 48, 48), (1, 80, 16)],
    "qwen3_5_moe": [(1, 32, 64)],
    "gemma3": [(1, 32, 32)],
    "gemma4": [(1, 128, 128), (1, 48, 336), (1, 32, 16)],
    "gemma4_moe": [(1, 112, 160), (1, 224, 64)],
    "gemma4_unified": [(1, 128, 128), (1, 48, 336)],
    "llama4": [(1, 32, 32), (5, 32, 32)],
    "mistral3": [(1, 64, 64), (1, 32, 48)],
    "idefics3": [(5, 32, 32), (1, 32, 32), (1, 48, 48)],
    "smolvlm": [(5, 32, 32), (1, 64, 64)],
    "internvl": [(1, 32, 32), (3, 32, 32), (1, 48, 48)],
    "internvl_norms": [(3, 32, 32)],
    "lfm2_vl": [(1, 48, 32), (4, 32, 32), (1, 16, 112), (1, 96, 96)],
}
"""Tiles, height and width of images, as a processor cuts them."""
SIZES = [(40, 70), (32, 32), (100, 30), (20, 64), (300, 310)]
"""Height and width of images as they come, whose tiles follow."""


def any_size(name: str, size: tuple[int, int]) -> tuple[int, int, int]:
    """Tiles of an image of `size`, the whole of it first."""
    height, width = select_best_resolution(size, CONFIGS[name]["image_grid_pinpoints"])
    return 1 + height // TILE * width // TILE, TILE, TILE


CASES = [(name, shape, (77, 99)) for name, shapes in SHAPES.items() for shape in shapes]
CASES += [(name, any_size(name, size), size) for name in ("llava_next", "llava_onevision") for size in SIZES]
CASES += [("llava_onevision", (1, TILE, TILE), (50, 60))]


def prompt_image(shape: tuple[int, int, int], size: tuple[int, int], rows: int, seed: int = 0) -> PromptImage:
    """Noise of tiles of `shape`, whose features are `rows` in one run."""
    pixels = torch.randint(0, 256, (*shape, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return PromptImage(key=b"k" * 16, pixels=pixels.numpy().tobytes(), shape=shape, runs=((5, rows),), size=size)


def normalized(name: str, made: PromptImage) -> Tensor:
    """What the processor would give: [tiles, 3, height, width] f32."""
    told = PREPROCESSORS[name]
    values = torch.from_numpy(made.tiles.copy()).float() / 255
    return ((values - torch.tensor(told["image_mean"])) / torch.tensor(told["image_std"])).permute(0, 3, 1, 2)


def patches(pixels: Tensor, size: int = 8, merge: int = 2) -> tuple[Tensor, Tensor]:
    """Qwen's input: patches of two equal frames in squares of `merge` a side, and how many there are."""
    rows, columns = pixels.shape[2] // size, pixels.shape[3] // size
    grid = pixels[0].view(3, rows // merge, merge, size, columns // merge, merge, size).permute(1, 4, 2, 5, 0, 3, 6)
    frames = grid.reshape(rows * columns, 3, 1, size * size).expand(-1, -1, 2, -1)
    return frames.reshape(rows * columns, -1), torch.tensor([[1, rows, columns]])


def shaped(pixels: Tensor, size: int = 8) -> dict[str, Tensor]:
    """SigLIP 2's input of tiles of one shape: patches whose channels lie together, and how many there are."""
    rows, columns = pixels.shape[2] // size, pixels.shape[3] // size
    cut = pixels.view(len(pixels), 3, rows, size, columns, size).permute(0, 2, 4, 3, 5, 1)
    cut = cut.reshape(len(pixels), rows * columns, -1)
    shapes = torch.tensor([[rows, columns]] * len(pixels))
    return {"pixel_values": cut, "spatial_shapes": shapes, "pixel_attention_mask": torch.ones(cut.shape[:2]).int()}


def placed(name: str, pixels: Tensor) -> dict[str, Tensor]:
    """Gemma 4's input of one tile: patches whose channels lie together, and the column and line of each."""
    made = shaped(pixels, 16 if name == "gemma4_unified" else 8)
    rows, columns = made["spatial_shapes"][0].tolist()
    line, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    places = torch.stack((column.flatten(), line.flatten()), -1)[None]
    return {"pixel_values": made["pixel_values"], "image_position_ids": places}


@torch.no_grad()
def features(name: str, model: PreTrainedModel, made: PromptImage) -> Tensor:
    """transformers' features [rows, width] of an image; further ones stand beside them."""
    pixels, height = normalized(name, made), made.shape[1:]
    if name == "llama4":
        return model.multi_modal_projector(model.get_image_features(pixels).last_hidden_state).flatten(0, 1)
    whole = model.model
    if name in QWEN:
        cut, grid = patches(pixels)
        found = whole.get_image_features(cut, image_grid_thw=grid)
        deep = [part[0] for part in found.deepstack_features] if name in DEEP else []
        return torch.cat((found.pooler_output[0], *deep), 1)
    if name in ("llava_next", "llava_onevision"):
        more = {"batch_num_images": torch.tensor([2])} if name == "llava_onevision" and len(pixels) == 1 else {}
        sizes = torch.tensor([made.size])
        return whole.get_image_features(pixels[None], image_sizes=sizes, **more).pooler_output[0]
    if name in ("mistral3", "llava_pixtral"):
        return whole.get_image_features(pixels, image_sizes=torch.tensor([height])).pooler_output[0]
    if name in ("idefics3", "smolvlm"):
        return whole.get_image_features(pixels[None]).pooler_output[0]
    if name in LIKE_GEMMA4:
        return torch.cat(whole.get_image_features(**placed(name, pixels)).pooler_output)
    if name == "lfm2_vl":
        return torch.cat(whole.get_image_features(**shaped(pixels)).pooler_output)
    found = whole.get_image_features(pixels).pooler_output
    return torch.cat(list(found))


class Made:
    """A folder of a family, and the model in it by transformers' code; written once."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.oracle = make_vision_model(name, folder)

    @cache  # noqa: B019  (there is one object for each family, which the module keeps)
    def load(self, device: str, **options: Any) -> Model:
        return load_model(flat_config(model=str(self.folder), **options), backend(device))

    def want(self, shape: tuple[int, int, int], size: tuple[int, int]) -> tuple[PromptImage, Tensor]:
        """An image and transformers' features of it."""
        want = features(self.name, self.oracle, prompt_image(shape, size, 1))
        return prompt_image(shape, size, len(want)), want


def see(model: Model, shown: PromptImage) -> Tensor:
    """The tower's features, as torch has them."""
    assert model.vision is not None
    return to_torch(model.vision.tower.ops.host(model.vision(shown)))
