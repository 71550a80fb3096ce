"""Prompts with images for tiny models of every family that takes any."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import PreTrainedModel

from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.images.prompt import open_image_prompts
from quire.text.tokenizer import Tokenizer
from vision_models import VOCABULARY, make_vision_model

SIZES = ((40, 56), (64, 32), (97, 33), (20, 20), (56, 56))
PROMPTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "none": ("what is there to be seen?", ()),
    "one": ("see {} here.", (0,)),
    "three": ("first {} then {}, and {}: which is the largest of them?", (1, 2, 3)),
    "again": ("see {} once more", (0,)),
    "late": ("a text of some length comes before what is to be seen, which is {}", (4,)),
}
"""Text with a place for each image, and the images by number."""


@dataclass
class Made:
    """A tiny model on disk, and what makes prompts; `oracle`: transformers' own, where it was just written."""

    family: str
    folder: Path
    oracle: PreTrainedModel | None = None
    tokenizer: Tokenizer = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizer = Tokenizer.from_folder(self.folder)
        found = open_image_prompts(self.folder, self.tokenizer)
        assert found is not None
        self.image_prompts = found

    def request(self, name: str, **params: Any) -> Request:
        text, numbers = PROMPTS[name.split("-")[0]]
        prepared = [self.image_prompts.prepare(photograph(*SIZES[i], i), alone=len(numbers) == 1) for i in numbers]
        whole = self.image_prompts.expand(text.format(*[self.image_prompts.image_token] * len(numbers)), prepared)
        ids, images = self.image_prompts.place(self.tokenizer.encode(whole), prepared, VOCABULARY)
        asked = SamplingParams(**({"max_tokens": 12, "temperature": 0.0, "logprobs": 4, "ignore_eos": True} | params))
        return Request(id=name, prompt=tuple(ids), params=asked, seed=3, arrival=0.0, images=images)

    def requests(self, **params: Any) -> list[Request]:
        found = [self.request(name, **params) for name in PROMPTS]
        return found + [self.request(f"{name}-sampled", **({"temperature": 1.0} | params)) for name in PROMPTS]


def photograph(height: int, width: int, seed: int) -> Image.Image:
    """Something with slopes and noise."""
    rng = np.random.default_rng(seed)
    slopes = np.linspace(0, 200, height)[:, None, None] + np.linspace(0, 50, width)[None, :, None]
    return Image.fromarray((slopes + rng.integers(0, 56, (height, width, 3))).clip(0, 255).astype(np.uint8))


def write_made(family: str, folder: Path) -> Made:
    oracle = make_vision_model(family, folder)
    return Made(family, folder, oracle)
