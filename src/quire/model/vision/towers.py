"""The rows of vision towers: one per model type of a `vision_config`, in terms of a decoder's families.

Names stand behind the beginning that a file's names have, which is found by that of the patch embedding.
"""

from __future__ import annotations

from dataclasses import replace

from quire.model.disk.hf_config import HfConfig
from quire.model.families.names import QKV_BIAS, without
from quire.model.families.row import Family
from quire.model.vision.newer_towers import NEWER_TOWERS
from quire.model.vision.tower_row import (
    LINEAR_BIASES,
    Tower,
    any_shape,
    full_layers,
    learned,
    merging,
    turning,
)

VIT = {
    "patch": "embeddings.patch_embedding",
    "positions": "embeddings.position_embedding",
    "final_norm": "post_layernorm",
    "layer": "encoder.layers.{}.",
    "attn_norm": "layer_norm1",
    "mlp_norm": "layer_norm2",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.out_proj",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
CLIP = without(VIT, "final_norm") | {"class_token": "embeddings.class_embedding", "embed_norm": "pre_layrnorm"}
PIXTRAL = {
    "patch": "patch_conv",
    "embed_norm": "ln_pre",
    "layer": "transformer.layers.{}.",
    "attn_norm": "attention_norm",
    "mlp_norm": "ffn_norm",
    **{role: f"attention.{role}_proj" for role in "qkvo"},
    **{role: f"feed_forward.{role}_proj" for role in ("gate", "up", "down")},
}
QWEN2 = {
    "patch": "patch_embed.proj",
    "layer": "blocks.{}.",
    "attn_norm": "norm1",
    "mlp_norm": "norm2",
    "qkv": "attn.qkv",
    "o": "attn.proj",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
QWEN2_5 = QWEN2 | {role: f"mlp.{role}_proj" for role in ("gate", "up", "down")}
QWEN3 = QWEN2 | {"positions": "pos_embed", "up": "mlp.linear_fc1", "down": "mlp.linear_fc2"}
INTERN = {
    "patch": "embeddings.patch_embeddings.projection",
    "class_token": "embeddings.cls_token",
    "positions": "embeddings.position_embeddings",
    "final_norm": "layernorm",
    "layer": "encoder.layer.{}.",
    "attn_norm": "layernorm_before",
    "mlp_norm": "layernorm_after",
    "q": "attention.q_proj",
    "k": "attention.k_proj",
    "v": "attention.v_proj",
    "q_row_norm": "attention.q_norm",
    "k_row_norm": "attention.k_norm",
    "o": "attention.projection_layer",
    "attn_scale": "lambda_1",
    "mlp_scale": "lambda_2",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
SIZES = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
         "image_size": 224}  # fmt: skip
NAVIT = {"hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16,
         "image_size": 224, "patch_size": 32, "hidden_act": "gelu_pytorch_tanh"}  # fmt: skip
QWEN_SPELLING = (("num_hidden_layers", "depth"), ("num_attention_heads", "num_heads"), ("num_channels", "in_channels"),
                 ("num_channels", "in_chans"))  # fmt: skip
QWEN_SIZES = {"depth": 32, "num_heads": 16, "patch_size": 14}
SCALES = ("attn_scale", "mlp_scale")
QKV_BIASES = ("qkv.bias", "o.bias")


def _wide(config: HfConfig) -> int:
    return int(config.number("mlp_ratio", 4.0) * config.integer("embed_dim", high=1 << 16))


_SIGLIP = Family(
    VIT,
    SIZES | {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh"},
    required=("patch", "patch.bias", "positions", *LINEAR_BIASES, "final_norm.bias"),
    skipped=("head.",),
    buffers=(".position_ids",),
)
_NAVIT = Tower(Family(VIT, NAVIT, required=_SIGLIP.required, buffers=_SIGLIP.buffers), learned("buckets"))
TOWERS: dict[str, Tower] = {
    "clip_vision_model": Tower(
        Family(
            CLIP,
            SIZES | {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
            required=("patch", "class_token", "positions", "embed_norm", "embed_norm.bias", *LINEAR_BIASES),
            skipped=("post_layernorm.",),
            buffers=(".position_ids",),
        ),
        learned(first=1),
    ),
    "siglip_vision_model": Tower(_SIGLIP, learned()),
    "siglip2_vision_model": Tower(replace(_SIGLIP, defaults={**_SIGLIP.defaults, "num_patches": 256}), any_shape),
    "idefics3_vision": _NAVIT,
    "smolvlm_vision": _NAVIT,
    "pixtral": Tower(
        Family(
            PIXTRAL,
            {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
             "patch_size": 16, "hidden_act": "gelu"},
            required=("patch", "embed_norm"),
        ),
        turning, "rms", 1e-5, "turns",
    ),
    "qwen2_vl_vision": Tower(
        Family(
            QWEN2,
            QWEN_SIZES | {"embed_dim": 1280, "hidden_act": "quick_gelu", "intermediate_size": _wide},
            required=("patch", *QKV_BIASES, "up.bias", "down.bias"),
            spelling=(("hidden_size", "embed_dim"), *QWEN_SPELLING),
        ),
        merging, "layer", 1e-6, "axes",
    ),
    "qwen2_5_vl_vision": Tower(
        Family(
            QWEN2_5,
            QWEN_SIZES | {"hidden_size": 3584, "intermediate_size": 3420, "hidden_act": "silu", "window_size": 112,
                          "fullatt_block_indexes": [7, 15, 23, 31]},
            required=("patch", *QKV_BIASES, "gate.bias", "up.bias", "down.bias"),
            spelling=QWEN_SPELLING,
        ),
        merging, "rms", 1e-6, "axes", full_layers,
    ),
    "qwen3_vl_vision": Tower(
        Family(
            QWEN3,
            {"depth": 27, "num_heads": 16, "patch_size": 16, "hidden_size": 1152, "intermediate_size": 4304,
             "hidden_act": "gelu_pytorch_tanh", "num_position_embeddings": 2304},
            required=("patch", "patch.bias", "positions", *QKV_BIASES, "up.bias", "down.bias"),
            spelling=QWEN_SPELLING,
        ),
        merging, "layer", 1e-6, "axes",
    ),
    "internvl_vision": Tower(
        Family(
            INTERN,
            {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
             "image_size": 448, "patch_size": 14, "hidden_act": "gelu", "use_absolute_position_embeddings": True},
            required=("patch", "patch.bias", "class_token", "o.bias", "up.bias", "down.bias", *SCALES),
            flags={"attention_bias": QKV_BIAS, "use_qk_norm": ("q_row_norm", "k_row_norm"),
                   "use_absolute_position_embeddings": ("positions",)},
            skipped=("embeddings.mask_token",),
        ),
        learned("bicubic", first=1), "named",
    ),
    **NEWER_TOWERS,
}  # fmt: skip
"""By `model_type` of a `vision_config`."""
SAME_TOWER = {
    "qwen2_vl": "qwen2_vl_vision",
    "qwen2_5_vl": "qwen2_5_vl_vision",
    "qwen3_vl": "qwen3_vl_vision",
    "idefics3": "idefics3_vision",
    "smolvlm": "smolvlm_vision",
    "siglip": "siglip_vision_model",
    "clip": "clip_vision_model",
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_vl_moe_vision"), "qwen3_vl_vision"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_vision", "qwen3_5_moe", "qwen3_5_moe_vision"), "qwen3_vl_vision"),
}
"""What older files call them, and families whose tower is another's."""


def is_known(name: str) -> bool:
    """Whether there is a row for this `model_type` of a `vision_config`."""
    return SAME_TOWER.get(name, name) in TOWERS


def find_tower(config: HfConfig, usual: str) -> tuple[str, Tower]:
    """The row for the `model_type` of a `vision_config`, `usual` where it has none; `ModelError` naming the known."""
    name = config.text("model_type", usual)
    name = SAME_TOWER.get(name, name)
    if name not in TOWERS:
        raise config.fail("model_type", f"{name!r} is not a tower that is built; built are {', '.join(TOWERS)}")
    return name, TOWERS[name]
