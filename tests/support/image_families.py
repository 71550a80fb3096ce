"""Families that take images: transformers' processors of each with a small tokenizer, and the files they save."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast, ProcessorMixin
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

# Its module imports a size from the processor by torchvision, which the one by Pillow has too.
_BY_TORCHVISION = "transformers.models.pixtral.image_processing_pixtral"
with patch.dict(sys.modules, {_BY_TORCHVISION: image_processing_pil_pixtral}):
    PixtralProcessor = import_module("transformers.models.pixtral.processing_pixtral").PixtralProcessor

GRID = [[56, 28], [28, 56], [56, 56], [84, 28], [28, 84]]
SQUARE = {"height": 28, "width": 28}
CROPPED = {"size": {"shortest_edge": 28}, "crop_size": SQUARE}


@dataclass(frozen=True)
class Case:
    """A family's processor in transformers, of images and of prompts, and what config.json says beside its type."""

    family: str
    kind: type[ProcessorMixin]
    images: Callable[[], Any]
    mark: str
    row: str
    facts: dict[str, Any] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    more: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)


QWEN = {"images": lambda: Qwen2VLImageProcessorPil(patch_size=7, min_pixels=14 * 14 * 4, max_pixels=14 * 14 * 50),
        "mark": "<|image_pad|>", "row": "<|image_pad|>"}  # fmt: skip
ROWS = tuple(f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7))
IDEFICS = {"images": lambda: Idefics3ImageProcessorPil(size={"longest_edge": 112}, max_image_size={"longest_edge": 28}),
           "mark": "<image>", "row": "<image>", "facts": {"image_seq_len": 4},
           "more": ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *ROWS)}  # fmt: skip
NEXT = {"mark": "<image>", "row": "<image>", "tokens": {"image_token": "<image>"}}
CASES = {
    "llava": Case(
        "llava", LlavaProcessor, lambda: CLIPImageProcessorPil(**CROPPED), "<image>", "<image>",
        {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        {"image_token": "<image>"},
    ),
    "llava, full": Case(
        "llava", LlavaProcessor, lambda: SiglipImageProcessorPil(size=SQUARE), "<image>", "<image>",
        {"patch_size": 7, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 0},
        more=("<image>",),
    ),
    "llava_next": Case(
        "llava_next", LlavaNextProcessor,
        lambda: LlavaNextImageProcessorPil(**CROPPED, image_grid_pinpoints=GRID), "<image>", "<image>",
        {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        {"image_token": "<image>"},
    ),
    "llava_onevision": Case(
        "llava_onevision", LlavaOnevisionProcessor,
        lambda: LlavaOnevisionImageProcessorPil(size=SQUARE, image_grid_pinpoints=GRID), "<image>", "<image>",
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_2"},
        {"image_token": "<image>", "video_token": "<video>"},
    ),
    "qwen2_vl": Case("qwen2_vl", Qwen2VLProcessor, more=("<|image_pad|>", "<|video_pad|>"), **QWEN),
    "qwen2_5_vl": Case("qwen2_5_vl", Qwen2_5_VLProcessor, more=("<|image_pad|>", "<|video_pad|>"), **QWEN),
    "qwen3_vl": Case(
        "qwen3_vl", Qwen3VLProcessor, more=("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
        **QWEN,
    ),
    "gemma3": Case(
        "gemma3", Gemma3Processor, lambda: Gemma3ImageProcessorPil(size=SQUARE), "<boi>", "<soft>",
        {"image_seq_length": 4}, {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<soft>"},
    ),
    "gemma3, scanned": Case(
        "gemma3", Gemma3Processor,
        lambda: Gemma3ImageProcessorPil(size=SQUARE, do_pan_and_scan=True, pan_and_scan_min_crop_size=16),
        "<boi>", "<soft>", {"image_seq_length": 4},
        {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<soft>"},
        call={"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16},
    ),
    "gemma4": Case(
        "gemma4", Gemma4Processor, lambda: Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70),
        "<|image|>", "<|image|>", {},
        {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>", "boa_token": "<|audio>",
         "eoa_token": "<audio|>", "audio_token": "<|audio|>", "pad_token": "<|end|>"},
    ),
    "mistral3": Case(
        "mistral3", PixtralProcessor, lambda: PixtralImageProcessorPil(size={"longest_edge": 90}), "[IMG]", "[IMG]",
        {"patch_size": 7, "spatial_merge_size": 2}, more=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    ),
    "idefics3": Case("idefics3", Idefics3Processor, **IDEFICS),
    "internvl": Case(
        "internvl", InternVLProcessor, lambda: GotOcr2ImageProcessorPil(size=SQUARE, max_patches=6),
        "<ctx>", "<ctx>", {"image_seq_length": 4},
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<ctx>",
         "video_token": "<video>"},
    ),
}  # fmt: skip


def backend(special: Sequence[str], plain: Sequence[str] = ()) -> Backend:
    """Bytes, and merges of spaces and ends of lines with what stands next to them, so that neighbours matter."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("Ġ", "a"), ("ĊĊ", "Ċ"), (".", "Ċ"), (".Ċ", "Ċ"), ("Ġ", "Ċ"), ("i", "s")]
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    found = Backend(models.BPE(vocab, merges))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    found.add_tokens([AddedToken(token, normalized=False) for token in plain])
    return found


class _Loose:
    """Nothing is asked of videos, whose processors need torchvision, and of audio."""

    def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
        return None


def processor_of(case: Case) -> Any:
    """transformers' own, with a small tokenizer."""
    tokens = [*dict.fromkeys((*case.tokens.values(), *case.more, "<|end|>"))]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend(tokens), **case.tokens)
    kind = type(case.kind.__name__, (_Loose, case.kind), {"__module__": case.kind.__module__})
    none = [name for name in ("video_processor", "feature_extractor") if name in case.kind.get_attributes()]
    return kind(image_processor=case.images(), tokenizer=tokenizer, **case.facts, **dict.fromkeys(none))


def folder_of(case: Case, folder: Path, processor: Any) -> Path:
    """The files of a model that images need, as transformers saves them."""
    folder.mkdir(parents=True, exist_ok=True)
    processor.tokenizer.save_pretrained(folder)
    said = {"image_processor": json.loads(processor.image_processor.to_json_string()), **case.facts}
    said |= {"processor_class": case.kind.__name__}
    (folder / "processor_config.json").write_text(json.dumps(said))
    row = processor.tokenizer.convert_tokens_to_ids(case.row)
    config = {"model_type": case.family, "image_token_id": row, **case.config}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
