"""Models that take images: where their config.json says what the decoder is, and what images change in it.

Their `text_config` is the config.json of a family of the table. What makes rows of images is in `model/vision`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.model.disk.hf_config import HfConfig
from quire.model.families.text_defaults import USUAL
from quire.model.spec import Sight

Raw = Mapping[str, Any]


def _plain(text: HfConfig, vision: HfConfig) -> Sight:
    return Sight()


def _mutual(text: HfConfig, vision: HfConfig) -> Sight:
    return Sight(mutual=True)


def _windowed(text: HfConfig, vision: HfConfig) -> Sight:
    """Gemma 4's large ones: rows of an image see each other in layers with windows; those of all are to per-layer
    embeddings what padding is."""
    mutual = text.text("use_bidirectional_attention", "") == "vision"
    return Sight(mutual=mutual, windows=mutual, token=text.integer("pad_token_id", 0, low=0))


def _sectioned(
    sections: tuple[int, ...], interleaved: bool = False, turning: float = 1.0
) -> Callable[[HfConfig, HfConfig], Sight]:
    """Frequencies that follow rows and columns (M-RoPE, Wang et al. 2024), `sections` where the file names none.

    `turning`: the share of a head's numbers that turn, where the file does not say it.
    """

    def read(text: HfConfig, vision: HfConfig) -> Sight:
        rope = text.child("rope_scaling" if text.has("rope_scaling") else "rope_parameters")
        found = rope.integers("mrope_section") or sections
        heads = text.integer("num_attention_heads", high=1 << 12)
        head_dim = text.integer("head_dim", text.integer("hidden_size", high=1 << 20) // heads, high=1 << 12)
        share = rope.number("partial_rotary_factor", text.number("partial_rotary_factor", turning, high=1.0), high=1.0)
        half = int(head_dim * share) // 2
        if len(found) != 3 or min(found) < 0 or sum(found) != half:
            raise rope.fail("mrope_section", f"is {list(found)}, needs three numbers whose sum is {half}")
        if interleaved and 3 * max(found[1:]) > half + 2:
            raise rope.fail("mrope_section", f"is {list(found)}: rows and columns take turns with more than there are")
        deep = len(vision.integers("deepstack_visual_indexes"))
        return Sight(found, rope.flag("mrope_interleaved", interleaved), deep)

    return read


@dataclass(frozen=True)
class MultimodalFamily:
    """One model type. `text`: that of its `text_config`, if this names none; `tower`: that of its `vision_config`.

    `tied`: whether its head is the table of tokens where neither part of the file says so and there is no other.
    `vision`: beginnings of names of tensors that are not the decoder's, behind "model." or nothing: first that of the
    tower's, then those of the projector's. `others`: fields of config.json with parts that are not built, and
    beginnings of the names of theirs.
    """

    text: str
    tower: str
    vision: tuple[str, ...]
    sight: Callable[[HfConfig, HfConfig], Sight] = _plain
    tied: bool = False
    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def left_out(self, raw: Raw) -> list[str]:
        """Lines that say which parts of a config.json do not run."""
        found = [name for name in self.others if raw.get(name)]
        return [f"of {raw['model_type']!r} {', '.join(found)} left out: its audio is refused"] if found else []


_LLAVA = ("vision_tower.", "multi_modal_projector.", "image_newline")
_VISUAL = ("visual.", "visual.merger.", "visual.deepstack_merger_list.")
_CONNECTED = ("vision_model.", "connector.")
_QUARTER = _sectioned((11, 11, 10), interleaved=True, turning=0.25)
MULTIMODAL: dict[str, MultimodalFamily] = {
    "llava": MultimodalFamily("llama", "clip_vision_model", _LLAVA),
    "llava_next": MultimodalFamily("llama", "clip_vision_model", _LLAVA),
    "llava_onevision": MultimodalFamily("qwen2", "siglip_vision_model", _LLAVA),
    "qwen2_vl": MultimodalFamily("qwen2", "qwen2_vl_vision", _VISUAL, _sectioned((16, 24, 24))),
    "qwen2_5_vl": MultimodalFamily("qwen2", "qwen2_5_vl_vision", _VISUAL, _sectioned((16, 24, 24))),
    "qwen3_vl": MultimodalFamily("qwen3", "qwen3_vl_vision", _VISUAL, _sectioned((24, 20, 20), interleaved=True)),
    "qwen3_vl_moe": MultimodalFamily(
        "qwen3_vl_moe_text", "qwen3_vl_moe_vision", _VISUAL, _sectioned((24, 20, 20), interleaved=True)
    ),
    "qwen3_5": MultimodalFamily("qwen3_5_text", "qwen3_5_vision", _VISUAL, _QUARTER),
    "qwen3_5_moe": MultimodalFamily("qwen3_5_moe_text", "qwen3_5_moe_vision", _VISUAL, _QUARTER),
    "gemma3": MultimodalFamily("gemma3_text", "siglip_vision_model", _LLAVA, _mutual, tied=True),
    "gemma4": MultimodalFamily(
        "gemma4_text", "gemma4_vision", ("vision_tower.", "embed_vision."), _windowed, tied=True,
        others={"audio_config": ("audio_tower.", "embed_audio.")},
    ),
    "gemma4_unified": MultimodalFamily(
        "gemma4_unified_text", "gemma4_unified_vision", ("vision_embedder.", "embed_vision."),
        _windowed, tied=True, others={"audio_config": ("embed_audio.",)},
    ),
    "mistral3": MultimodalFamily("mistral", "pixtral", _LLAVA, tied=True),
    "idefics3": MultimodalFamily("llama", "idefics3_vision", _CONNECTED),
    "smolvlm": MultimodalFamily("llama", "smolvlm_vision", _CONNECTED),
    "internvl": MultimodalFamily("qwen2", "internvl_vision", _LLAVA, tied=True),
    "llama4": MultimodalFamily(
        "llama4_text", "llama4_vision_model",
        ("vision_model.", "vision_model.vision_adapter.", "multi_modal_projector."),
    ),
    "lfm2_vl": MultimodalFamily("lfm2", "siglip2_vision_model", _LLAVA, tied=True),
}  # fmt: skip
"""By `model_type`."""
REFUSED = {
    "phi3_v": "its images are cut and joined by code in its folder, which is never run, and transformers has none",
    "phi4mm": "its images switch adapters on, which it keeps beside the decoder's matrices",
    "phi4_multimodal": "its images switch adapters on, which it keeps beside the decoder's matrices",
    "mllama": "its decoder attends to images in layers of their own",
}
"""Model types that take images and are not built, and why."""
SAME_TEXT = {"qwen2_vl": "qwen2", "qwen2_vl_text": "qwen2", "qwen2_5_vl": "qwen2", "qwen2_5_vl_text": "qwen2",
             "qwen3_vl": "qwen3", "qwen3_vl_text": "qwen3", "qwen2_5_omni_text": "qwen2", "exaone4_5_text": "exaone4",
             "qwen3_omni_moe_text": "qwen3_moe", "glm4v_moe_text": "glm4_moe", "emu3_text_model": "llama",
             "granite4_vision_text": "granite", "granite_docling_text": "granite"}  # fmt: skip
"""Model types of decoders that differ from a family's in what `Sight` says, and from it in nothing else."""
NESTED = ("language_model.model.", "model.language_model.", "model.text_model.")
"""What names of the decoder begin with, in the place of "model."."""
HEADS = ("language_model.lm_head",)

_SIZES = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_LLAMA = _SIZES | {"intermediate_size": 11008, "vocab_size": 32000}
_MISTRAL = _SIZES | {"intermediate_size": 14336, "vocab_size": 32000, "num_key_value_heads": 8}
_QWEN2 = _SIZES | {"intermediate_size": 22016, "vocab_size": 151936, "num_key_value_heads": 32}
_QWEN3_5 = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 16, "intermediate_size": 12288,
            "vocab_size": 248320}  # fmt: skip
_QWEN3_5_MOE = {"hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "vocab_size": 248320}
_GEMMA3 = {"hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
           "head_dim": 256, "intermediate_size": 9216, "vocab_size": 262208}  # fmt: skip
LEFT_OUT: dict[str, Raw] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": _QWEN2,
    "gemma3_text": _GEMMA3,
    "lfm2": {"hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 65536},
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "qwen4_exp_text": _QWEN3_5_MOE,
    "qwen2_vl_text": {"rope_theta": 1e6, "max_position_embeddings": 32768, "num_key_value_heads": 8},
    "qwen2_5_vl_text": {"rope_theta": 1e6, "max_position_embeddings": 32768, "num_key_value_heads": 8},
    "qwen3_vl_text": {"rope_theta": 5e5, "max_position_embeddings": 128000, "head_dim": 128},
    "qwen3_vl_moe_text": {
        "rope_theta": 5e5,
        "max_position_embeddings": 128000,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "vocab_size": 151936,
        "head_dim": 128,
    },
}
"""Fields that a `text_config` of this type leaves out where they are the family's usual ones."""
OUTER = ("quantization_config", "auto_map", "architectures", "torch_dtype", "dtype")
"""Fields of the whole model that are read with the decoder's."""


def vision_config(raw: Raw, where: str) -> HfConfig:
    """The config of the tower."""
    return HfConfig(raw, where).child("vision_config")


def text_config(raw: Raw, where: str) -> tuple[Raw, Sight]:
    """The decoder's config and what images change; `raw` itself and nothing where the model takes no images.

    `ModelError` for a model type that takes images and is not built, with the reason.
    """
    outer = HfConfig(raw, where)
    name = raw.get("model_type")
    if isinstance(name, str) and name in REFUSED:
        raise outer.fail("model_type", f"{name!r} is not supported: {REFUSED[name]}")
    row = MULTIMODAL.get(name) if isinstance(name, str) else None
    if row is None:
        return raw, Sight()
    nested = raw.get("text_config")
    inner = dict(outer.child("text_config").raw) if nested else {k: v for k, v in raw.items() if k != "vision_config"}
    kind = (inner.get("model_type") if nested else None) or row.text
    usual = LEFT_OUT.get(f"{name}_text") or LEFT_OUT.get(kind) or USUAL.get(kind, {})
    inner |= {field: value for field, value in usual.items() if inner.get(field) is None}
    inner |= {field: raw[field] for field in OUTER if raw.get(field) is not None}
    inner |= {field: raw[field] for field in ("bos_token_id", "eos_token_id") if field in raw and field not in inner}
    said = [part["tie_word_embeddings"] for part in (raw, inner) if part.get("tie_word_embeddings") is not None]
    inner["tie_word_embeddings"] = True in said if said else row.tied
    inner["model_type"] = SAME_TEXT.get(kind, kind)
    sight = row.sight(HfConfig(inner, where), vision_config(raw, where))
    return without_kind(inner), sight


def without_kind(text: Raw) -> Raw:
    """A rope whose kind is called "mrope" is a plain one over several positions."""
    named = {field: dict(text[field]) for field in ("rope_scaling", "rope_parameters") if text.get(field)}
    for rope in named.values():
        for kind in ("type", "rope_type"):
            if rope.get(kind) == "mrope":
                rope[kind] = "default"
    return {**text, **named}
