"""Prompts with images for engines whose tower is made up: a function of pixels, over text models of transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model, get_block_sequence_ids_for_mask
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

from oracle import SMALL, write
from quire.core.config import flat_config
from quire.core.images import PromptImage, grid_positions, placeholders
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.local import LocalEngine
from quire.model.build import Model, load_model
from quire.model.spec import Sight

VOCAB, HIDDEN = SMALL["vocab_size"], SMALL["hidden_size"]
WINDOW = 8
SIGHTS: dict[str, tuple[str, dict[str, Any], Sight]] = {
    "llama": ("llama", {}, Sight()),
    "sections": ("qwen2", {}, Sight(sections=(2, 3, 3))),
    "deep": ("qwen3", {"head_dim": 24}, Sight(sections=(6, 3, 3), interleaved=True, deep=2)),
    "mutual": ("gemma3_text", {"head_dim": 24, "sliding_window": WINDOW, "query_pre_attn_scalar": 24,
                               "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
               Sight(mutual=True)),
}  # fmt: skip
"""Text model, its facts, what images change in it."""


class Shown(NamedTuple):
    """An image by the number it is made of, of h x w rows."""

    number: int
    height: int
    width: int


Part = Shown | list[int]


class MadeUpTower:
    """Features are random numbers that the pixels begin."""

    nbytes = 0
    file: Path | None = None

    def __init__(self, sight: Sight) -> None:
        self.width = HIDDEN * (1 + sight.deep)
        self.encoded: list[bytes] = []

    def scratch(self, rows: int) -> int:
        return 0

    def __call__(self, image: PromptImage) -> Tensor:
        self.encoded.append(image.key)
        return features(image, self.width)


def features(image: PromptImage, width: int) -> Tensor:
    """What a made-up tower makes of it, [rows, width]."""
    seed = int.from_bytes(hashlib.blake2b(image.pixels, digest_size=7).digest(), "big")
    return torch.randn(image.rows, width, generator=torch.Generator().manual_seed(seed)) * 0.5


def prompt_of(parts: Sequence[Part], vocab: int = VOCAB) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
    """Tokens and images as a request has them."""
    tokens, images = list[int](), list[PromptImage]()
    for part in parts:
        if not isinstance(part, Shown):
            tokens += part
            continue
        rows, pixels = part.height * part.width, bytes([part.number, part.height, part.width])
        key = hashlib.blake2b(pixels, digest_size=16).digest()
        images.append(
            PromptImage(key=key, pixels=pixels, shape=(1, 1, 1), runs=((len(tokens), rows),), size=(8, 8),
                    grid=(part.height, part.width))
        )  # fmt: skip
        tokens += placeholders(key, rows, vocab)
    return tuple(tokens), tuple(images)


def image_request(name: str, parts: Sequence[Part], seed: int = 0, **params: Any) -> Request:
    """A request for such a prompt."""
    tokens, images = prompt_of(parts)
    asked = SamplingParams(**({"max_tokens": 6, "temperature": 0.0, "logprobs": 5, "ignore_eos": True} | params))
    return Request(id=name, prompt=tokens, params=asked, seed=seed, arrival=0.0, images=images)


@contextmanager
def sighted(folder: Path | str, sight: Sight, **options: Any) -> Iterator[tuple[LocalEngine, MadeUpTower]]:
    """An engine of the text model in `folder` with a made-up tower before it."""
    tower = MadeUpTower(sight)

    def load(*args: Any) -> Model:
        model = load_model(*args)
        return replace(model, vision=tower, spec=replace(model.spec, sight=sight))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("quire.engine.start.load_model", load)
        config = {"model": str(folder), "dtype": "float32", "device": "cpu", "num_blocks": 128, "block_size": 4}
        engine = LocalEngine(flat_config(**(config | options)))
        yield engine, tower
        engine.close()


def write_text(folder: Path, name: str) -> PreTrainedModel:
    """The text model of one of `SIGHTS`."""
    family, facts, _ = SIGHTS[name]
    return write(folder, family, **facts)


def oracle_logits(model: PreTrainedModel, name: str, request: Request, output: Sequence[int] = ()) -> Tensor:
    """transformers' logits [tokens, vocab] of the text model for prompt and output, rows of images given."""
    sight, images = SIGHTS[name][2], request.images
    tokens = [*request.prompt, *output]
    seen = torch.tensor([token >= VOCAB for token in tokens])
    given = torch.cat([features(p, HIDDEN * (1 + sight.deep)) for p in images] or [torch.zeros(0, HIDDEN)])
    with torch.no_grad():
        ids = torch.tensor(tokens).where(~seen, torch.tensor(0))
        x = model.get_input_embeddings()(ids)
        x[seen] = given[:, :HIDDEN]
        places = torch.from_numpy(grid_positions(images, 0, len(tokens))).long()[:, None]
        if name == "mutual":
            blocks = get_block_sequence_ids_for_mask(seen.long()[None])
            masks = create_masks_for_vision_model(model.config, x[None], None, None, None, blocks)
            return model(inputs_embeds=x[None], attention_mask=masks, use_cache=False).logits[0]
        if not sight.sections:
            return model(inputs_embeds=x[None], use_cache=False).logits[0]
        further = given.split(HIDDEN, 1)[1:]
        kwargs: dict[str, Any] = {"visual_pos_masks": seen[None], "deepstack_visual_embeds": list(further)}
        made = _by_sections(model, sight)
        hidden = made(inputs_embeds=x[None], position_ids=places, use_cache=False, **(kwargs if further else {}))
        return model.lm_head(hidden.last_hidden_state)[0]


def _by_sections(model: PreTrainedModel, sight: Sight) -> PreTrainedModel:
    """The text model of the family that images turn by sections, with the weights of `model`."""
    kept = {k: v for k, v in model.config.to_dict().items() if k in (*SMALL, "head_dim", "rms_norm_eps")}
    rope = {"rope_type": "default", "rope_theta": model.config.rope_parameters["rope_theta"],
            "mrope_section": list(sight.sections)}  # fmt: skip
    config = (Qwen3VLTextConfig if sight.interleaved else Qwen2VLTextConfig)(**kept, rope_parameters=rope)
    config._attn_implementation = "eager"
    made = (Qwen3VLTextModel if sight.interleaved else Qwen2VLTextModel)(config).eval().float()
    made.load_state_dict(model.model.state_dict(), strict=True)
    return made
