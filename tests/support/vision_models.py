"""Tiny random checkpoints of models that take images, written by transformers with all files of such a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from chunked_models import LLAMA4
from oracle import SMALL, is_norm

CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
HALF = [0.5, 0.5, 0.5]
ROWS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))
NAMED = tuple(f"<|img_row_{row}_col_{column}|>" for row in range(1, 7) for column in range(1, 7))
SPECIAL = (
    "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>", "<image>", "<|image_pad|>", "<|video_pad|>",
    "<|vision_start|>", "<|vision_end|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<start_of_image>", "<end_of_image>",
    "<image_soft_token>", "<fake_token_around_image>", "<global-img>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>",
    *ROWS, "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *NAMED, "<|image>", "<|image|>", "<image|>",
    "<|audio|>", "<|video|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>",
)  # fmt: skip
"""Tokens by which some family marks images; ids are places in this list."""
VOCABULARY = len(SPECIAL) + 256
TEXT = SMALL | {"vocab_size": VOCABULARY, "max_position_embeddings": 1024, "pad_token_id": 0, "eos_token_id": 3,
                "bos_token_id": 0, "tie_word_embeddings": False}  # fmt: skip
TOWER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_channels": 3,
}
QWEN_TOWER = {"depth": 3, "num_heads": 4, "in_channels": 3, "patch_size": 8, "spatial_merge_size": 2,
              "temporal_patch_size": 2}  # fmt: skip
QWEN_TOKENS = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
               "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}  # fmt: skip
PINPOINTS = [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96], [128, 128]]

HYBRID = TEXT | {"head_dim": 32, "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
                 "linear_num_key_heads": 4, "linear_num_value_heads": 16, "linear_key_head_dim": 16,
                 "linear_value_head_dim": 8,
                 "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                                     "mrope_section": [3, 3, 2], "mrope_interleaved": True}}  # fmt: skip
QWEN3_5: dict[str, Any] = {
    "vision_config": QWEN_TOWER | {"hidden_size": 64, "intermediate_size": 96, "out_hidden_size": 64,
                                   "num_position_embeddings": 16},
    "text_config": HYBRID | {"model_type": "qwen3_5_text"}, **QWEN_TOKENS,
}  # fmt: skip

GEMMA4 = {
    "vision_config": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
                      "num_key_value_heads": 4, "head_dim": 16, "patch_size": 8, "pooling_kernel_size": 2,
                      "position_embedding_size": 160},
    "image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>",
    "audio_token_id": "<|audio|>", "video_token_id": "<|video|>", "tie_word_embeddings": True,
}  # fmt: skip
GEMMA4_TEXT = TEXT | {
    "head_dim": 16, "global_head_dim": 32, "sliding_window": 24, "num_hidden_layers": 4, "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "final_logit_softcapping": 2.0,
}  # fmt: skip
GEMMA4_AUDIO = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "output_proj_dims": 32,
                "subsampling_conv_channels": [8, 8]}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "llava": {
        "vision_config": TOWER | {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14},
        "text_config": TEXT | {"model_type": "llama"}, "image_token_index": "<image>", "image_seq_length": 16,
    },
    "llava_siglip": {
        "vision_config": TOWER | {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8},
        "text_config": TEXT | {"model_type": "qwen2"}, "image_token_index": "<image>", "image_seq_length": 16,
        "vision_feature_select_strategy": "full", "vision_feature_layer": [-2, -1],
    },
    "llava_pixtral": {
        "vision_config": TOWER | {"model_type": "pixtral", "image_size": 64, "patch_size": 8, "hidden_act": "silu"},
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": None}, "image_token_index": "[IMG]",
        "vision_feature_select_strategy": "full", "vision_feature_layer": -1,
    },
    "llava_next": {
        "vision_config": TOWER | {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8},
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": None}, "image_token_index": "<image>",
        "image_grid_pinpoints": PINPOINTS, "image_seq_length": 16,
    },
    "llava_onevision": {
        "vision_config": TOWER | {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8,
                                  "vision_use_head": False},
        "text_config": TEXT | {"model_type": "qwen2"}, "image_token_index": "<image>",
        "video_token_index": "<video>", "image_grid_pinpoints": [[32, 32], *PINPOINTS],
    },
    "qwen2_vl": {
        "vision_config": QWEN_TOWER | {"embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2},
        "text_config": TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6,
                                                   "mrope_section": [2, 3, 3]}},
        **QWEN_TOKENS,
    },
    "qwen2_5_vl": {
        "vision_config": QWEN_TOWER | {"hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 96,
                                       "window_size": 32, "fullatt_block_indexes": [1]},
        "text_config": TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6,
                                                   "mrope_section": [2, 3, 3]}},
        **QWEN_TOKENS,
    },
    "qwen3_vl": {
        "vision_config": QWEN_TOWER | {"hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 96,
                                       "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]},
        "text_config": TEXT | {"head_dim": 24, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 3, 3], "mrope_interleaved": True}},
        **QWEN_TOKENS,
    },
    "qwen3_vl_moe": {
        "vision_config": QWEN_TOWER | {"hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 96,
                                       "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]},
        "text_config": TEXT | {"head_dim": 24, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96,
                               "mlp_only_layers": [0], "tie_word_embeddings": False, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 3, 3], "mrope_interleaved": True}},
        "tie_word_embeddings": False, **QWEN_TOKENS,
    },
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5 | {"text_config": HYBRID | {
        "model_type": "qwen3_5_moe_text", "num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64}},
    "gemma3": {
        "vision_config": TOWER | {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8,
                                  "vision_use_head": False},
        "text_config": TEXT | {"model_type": "gemma3_text", "head_dim": 24, "sliding_window": 8,
                               "query_pre_attn_scalar": 24, "tie_word_embeddings": True,
                               "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "mm_tokens_per_image": 4, "tie_word_embeddings": True, "image_token_index": "<image_soft_token>",
        "boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>",
    },
    "gemma4": GEMMA4 | {
        "vision_config": GEMMA4["vision_config"] | {"use_clipped_linears": True},
        "audio_config": GEMMA4_AUDIO,
        "text_config": GEMMA4_TEXT | {
            "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True, "pad_token_id": 5},
    },
    "gemma4_moe": GEMMA4 | {
        "vision_config": GEMMA4["vision_config"] | {"standardize": True}, "audio_config": None,
        "text_config": GEMMA4_TEXT | {
            "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3,
            "moe_intermediate_size": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
            "use_bidirectional_attention": "vision"},
    },
    "gemma4_unified": GEMMA4 | {
        "vision_config": {"mm_embed_dim": 64, "mm_posemb_size": 40, "output_proj_dims": 64, "patch_size": 8,
                          "pooling_kernel_size": 2},
        "audio_config": {"output_proj_dims": 32},
        "text_config": GEMMA4_TEXT | {"num_global_key_value_heads": 1},
    },
    "llama4": {
        "vision_config": TOWER | {"model_type": "llama4_vision_model", "image_size": 32, "patch_size": 8,
                                  "intermediate_size": 256, "projector_input_dim": 48, "projector_output_dim": 48,
                                  "vision_output_dim": 48},
        "text_config": TEXT | LLAMA4 | {"model_type": "llama4_text", "no_rope_layers": [1, 0, 1],
                                        "interleave_moe_layer_step": 2, "intermediate_size": 64},
        "image_token_index": "<|patch|>", "boi_token_index": "<|image_start|>", "eoi_token_index": "<|image_end|>",
    },
    "mistral3": {
        "vision_config": TOWER | {"model_type": "pixtral", "image_size": 64, "patch_size": 8, "hidden_act": "silu"},
        "text_config": TEXT | {"model_type": "mistral", "head_dim": 24, "sliding_window": None},
        "image_token_index": "[IMG]", "spatial_merge_size": 2, "tie_word_embeddings": False,
    },
    "idefics3": {
        "vision_config": TOWER | {"model_type": "idefics3_vision", "image_size": 32, "patch_size": 8},
        "text_config": TEXT | {"model_type": "llama"}, "image_token_id": "<image>", "scale_factor": 2,
    },
    "smolvlm": {
        "vision_config": TOWER | {"model_type": "smolvlm_vision", "image_size": 32, "patch_size": 8},
        "text_config": TEXT | {"model_type": "llama"}, "image_token_id": "<image>", "scale_factor": 2,
    },
    "internvl": {
        "vision_config": TOWER | {"model_type": "internvl_vision", "image_size": [32, 32], "patch_size": [8, 8],
                                  "attention_bias": True},
        "text_config": TEXT | {"model_type": "qwen2"}, "image_token_id": "<IMG_CONTEXT>", "image_seq_length": 4,
        "tie_word_embeddings": False,
    },
    "internvl_norms": {
        "vision_config": TOWER | {"model_type": "internvl_vision", "image_size": [32, 32], "patch_size": [8, 8],
                                  "use_qk_norm": True, "norm_type": "rms_norm"},
        "text_config": TEXT | {"model_type": "qwen3", "head_dim": 24}, "image_token_id": "<IMG_CONTEXT>",
        "image_seq_length": 4, "tie_word_embeddings": False,
    },
    "lfm2_vl": {
        "vision_config": TOWER | {"model_type": "siglip2_vision_model", "patch_size": 8, "num_patches": 36,
                                  "vision_use_head": False},
        "text_config": TEXT | {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"],
                               "block_multiple_of": 32},
        "image_token_id": "<image>", "projector_hidden_size": 48, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""config.json of each; a token stands where its id belongs."""
FAMILIES = tuple(CONFIGS)
"""What `make_vision_model` makes: model types, and a second kind of some."""
LIKE_GEMMA4 = ("gemma4", "gemma4_moe", "gemma4_unified")
LIKE_QWEN3 = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")

CLIP = {"image_processor_type": "CLIPImageProcessor", "image_mean": CLIP_MEAN, "image_std": CLIP_STD, "resample": 3}
SIGLIP = {"image_processor_type": "SiglipImageProcessor", "image_mean": HALF, "image_std": HALF, "resample": 3}
PIXTRAL = {"image_processor_type": "PixtralImageProcessor", "image_mean": CLIP_MEAN, "image_std": CLIP_STD,
           "patch_size": {"height": 8, "width": 8}, "size": {"longest_edge": 64}, "resample": 3}  # fmt: skip
QWEN = {"image_processor_type": "Qwen2VLImageProcessorFast", "image_mean": CLIP_MEAN, "image_std": CLIP_STD,
        "patch_size": 8, "temporal_patch_size": 2, "merge_size": 2, "resample": 3,
        "size": {"shortest_edge": 256, "longest_edge": 4096}}  # fmt: skip
IDEFICS = {"image_processor_type": "Idefics3ImageProcessor", "image_mean": HALF, "image_std": HALF, "resample": 1,
           "size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32},
           "do_image_splitting": True}  # fmt: skip
INTERN = {"image_processor_type": "GotOcr2ImageProcessorFast", "image_mean": CLIP_MEAN, "image_std": CLIP_STD,
          "size": {"height": 32, "width": 32}, "crop_to_patches": True, "min_patches": 1, "max_patches": 6,
          "resample": 3}  # fmt: skip
BUDGET = {"image_processor_type": "Gemma4ImageProcessorFast", "do_normalize": False, "image_mean": [0.0] * 3,
          "image_std": [1.0] * 3, "patch_size": 8, "pooling_kernel_size": 2, "max_soft_tokens": 70,
          "resample": 3}  # fmt: skip
PREPROCESSORS: dict[str, dict[str, Any]] = {
    "llava": CLIP | {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
    "llava_siglip": SIGLIP | {"size": {"height": 32, "width": 32}},
    "llava_pixtral": PIXTRAL,
    "llava_next": CLIP | {"image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 32},
                          "crop_size": {"height": 32, "width": 32}, "image_grid_pinpoints": PINPOINTS},
    "llava_onevision": SIGLIP | {"image_processor_type": "LlavaOnevisionImageProcessor",
                                 "size": {"height": 32, "width": 32}, "image_grid_pinpoints": [[32, 32], *PINPOINTS]},
    "qwen2_vl": QWEN | {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 256, "max_pixels": 4096},
    "qwen2_5_vl": QWEN,
    **dict.fromkeys(LIKE_QWEN3, QWEN | {"image_mean": HALF, "image_std": HALF}),
    "gemma3": SIGLIP | {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32},
                        "resample": 2},
    **dict.fromkeys(("gemma4", "gemma4_moe"), BUDGET),
    "gemma4_unified": BUDGET | {"image_processor_type": "Gemma4UnifiedImageProcessor"},
    "llama4": {"image_processor_type": "Llama4ImageProcessorFast", "image_mean": HALF, "image_std": HALF,
               "size": {"height": 32, "width": 32}, "max_patches": 6, "resample": 2},
    "mistral3": PIXTRAL,
    "idefics3": IDEFICS,
    "smolvlm": IDEFICS | {"image_processor_type": "SmolVLMImageProcessor"},
    "internvl": INTERN,
    "internvl_norms": INTERN,
    "lfm2_vl": {"image_processor_type": "Lfm2VlImageProcessorFast", "image_mean": HALF, "image_std": HALF,
                "resample": 2, "encoder_patch_size": 8, "downsample_factor": 2, "tile_size": 32, "min_tiles": 2,
                "max_tiles": 6, "min_image_tokens": 2, "max_image_tokens": 8, "max_pixels_tolerance": 1.0},
}  # fmt: skip
COMMON = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "rescale_factor": 1 / 255,
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "llava": {"processor_class": "LlavaProcessor", "image_token": "<image>", "patch_size": 14,
              "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    "llava_siglip": {"processor_class": "LlavaProcessor", "image_token": "<image>", "patch_size": 8,
                     "vision_feature_select_strategy": "full", "num_additional_image_tokens": 0},
    "llava_pixtral": {"processor_class": "PixtralProcessor", "image_token": "[IMG]", "patch_size": 8,
                      "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]", "spatial_merge_size": 1},
    "llava_next": {"processor_class": "LlavaNextProcessor", "image_token": "<image>", "patch_size": 8,
                   "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    "llava_onevision": {"processor_class": "LlavaOnevisionProcessor", "image_token": "<image>",
                        "num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    "qwen2_vl": {"processor_class": "Qwen2VLProcessor"},
    "qwen2_5_vl": {"processor_class": "Qwen2_5_VLProcessor"},
    **{name: {"processor_class": "Qwen3VLProcessor"} for name in LIKE_QWEN3},
    "gemma3": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
    **{name: {"processor_class": "Gemma4Processor"} for name in ("gemma4", "gemma4_moe")},
    "gemma4_unified": {"processor_class": "Gemma4UnifiedProcessor"},
    "mistral3": {"processor_class": "PixtralProcessor", "image_token": "[IMG]", "patch_size": 8,
                 "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]", "spatial_merge_size": 2},
    "idefics3": {"processor_class": "Idefics3Processor", "image_seq_len": 4},
    "smolvlm": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
    "internvl": {"processor_class": "InternVLProcessor", "image_seq_length": 4},
    "internvl_norms": {"processor_class": "InternVLProcessor", "image_seq_length": 4},
    "lfm2_vl": {"processor_class": "Lfm2VlProcessor"},
    "llama4": {"processor_class": "Llama4Processor", "patch_size": 8, "pixel_shuffle_ratio": 0.5},
}  # fmt: skip
MARKS = {"qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>", "gemma3": "<start_of_image>", "mistral3": "[IMG]",
         "llava_pixtral": "[IMG]", "internvl": "<IMG_CONTEXT>"}  # fmt: skip
MARKS |= dict.fromkeys(("qwen2_5_vl", *LIKE_QWEN3), MARKS["qwen2_vl"])
MARKS |= {"internvl_norms": MARKS["internvl"], **dict.fromkeys((*LIKE_GEMMA4, "llama4"), "<|image|>")}
"""What a chat template writes for an image, if not <image>."""
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}{{ 'MARK' }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


BUFFERS = {"input_min": -1.0, "input_max": 0.3, "output_min": -1.0, "output_max": 0.2, "layer_scalar": 0.5,
           "std_bias": -0.5, "std_scale": 0.5}  # fmt: skip
"""Least numbers of buffers that files have."""


def family_of(name: str) -> str:
    """The model type of a name of `FAMILIES`."""
    return {"llava_siglip": "llava", "llava_pixtral": "llava", "internvl_norms": "internvl",
            "gemma4_moe": "gemma4"}.get(name, name)  # fmt: skip


def with_ids(facts: dict[str, Any]) -> dict[str, Any]:
    """`facts` with ids in the places of tokens."""
    return {k: SPECIAL.index(v) if isinstance(v, str) and v in SPECIAL else v for k, v in facts.items()}


def make_vision_model(
    family: str, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **facts: Any
) -> PreTrainedModel:
    """Write the model with random weights in `dtype` to `folder`, `facts` in the place of fields of its config.json.

    Returns it as float32, with the same numbers.
    """
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family_of(family), **with_ids(CONFIGS[family] | facts))
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            spread = 0.08 if p.ndim > 1 else 0.3
            shift = 1.0 if p.ndim == 1 and is_norm(name) else 0.0
            p.copy_((torch.randn_like(p) * spread + shift).to(dtype))
        for name, b in model.named_buffers():
            if (low := BUFFERS.get(name.rpartition(".")[2])) is not None:
                b.copy_((low + torch.rand_like(b)).to(dtype))
    if dtype is not torch.float32:  # which would make Llama 4's complex rotations real
        model.to(dtype)
    model.save_pretrained(folder)
    write_files(family, folder)
    return model.float()


def write_files(family: str, folder: Path) -> None:
    """Tokenizer, chat template and processors."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*SPECIAL, *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    template = TEMPLATE.replace("MARK", MARKS.get(family, "<image>"))
    files = {
        "tokenizer_config.json": {"eos_token": "<|end|>", "pad_token": "<|endoftext|>", "chat_template": template,
                                  "tokenizer_class": "PreTrainedTokenizerFast"},
        "preprocessor_config.json": COMMON | PREPROCESSORS[family],
        "processor_config.json": PROCESSORS[family],
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
