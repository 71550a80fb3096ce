"""A folder of a model with images and the two GGUF files made of it, and what each answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from mmproj_models import make_source, write_mmproj, write_text
from oracle import BACKENDS, backend
from quire import LLM
from quire.core.config import flat_config
from quire.core.params import SamplingParams
from quire.model.build import Model, load_model
from vision_models import LIKE_GEMMA4
from vision_oracle import SHAPES, any_size, prompt_image, see
from vision_prompts import photograph

CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": [
        {"type": "image", "image": photograph(90, 130, 1)}, {"type": "text", "text": "What is this?"}]},
]  # fmt: skip
OWN = {"lfm2_vl": (1, 64, 96), **dict.fromkeys(LIKE_GEMMA4, (1, 72, 120))}
"""Tiles of images, where they are not those of `SHAPES`."""
SIZE = (77, 99)
"""Height and width of an image as it comes."""


class Pair:
    """`source`: the folder, `folder`: that of both files, `text` and `mmproj`."""

    def __init__(self, family: str, root: Path) -> None:
        self.family, self.source, self.folder = family, root / "source", root / "files"
        self.folder.mkdir()
        make_source(family, self.source)
        self.text, self.mmproj = self.folder / "tiny.gguf", self.folder / "mmproj-tiny.gguf"
        write_text(family, self.source, self.text)
        self.write()

    def write(self) -> None:
        """Write the mmproj file."""
        write_mmproj(self.family, self.source, self.mmproj)


def load(model: Path, **options: Any) -> Model:
    """The model in 32 bits."""
    return load_model(flat_config(model=str(model), dtype="float32", **options), backend(BACKENDS[-1]))


def rows_of(family: str, model: Model) -> Tensor:
    """Rows of an image of noise, as many as the tower makes."""
    shape = OWN.get(family) or (SHAPES[family][0] if family in SHAPES else any_size(family, SIZE))
    assert model.vision is not None
    with pytest.raises(ValueError, match="the tower makes") as counted:
        model.vision(prompt_image(shape, SIZE, 1000))
    return see(model, prompt_image(shape, SIZE, int(str(counted.value).split()[3])))


def answered(model: Path) -> tuple[list[int], list[int]]:
    """Token ids of a prompt with an image, and of the answer."""
    with LLM(str(model), dtype="float32", device="cpu", num_blocks=2048, block_size=16) as llm:
        assert llm.info.takes_images
        answer = llm.chat(CHAT, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))[0]
        return list(answer.prompt_token_ids), list(answer.outputs[0].token_ids)
