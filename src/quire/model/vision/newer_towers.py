"""Rows of vision towers of 2026: Gemma 4's, and what it has in the place of one (Team Gemma 2026); Llama 4's (Meta AI
2025)."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from quire.model.disk.hf_config import HfConfig
from quire.model.families.row import Family
from quire.model.tower_roles import BOUNDED, BOUNDS
from quire.model.tower_sizes import Patches
from quire.model.vision.reading import square
from quire.model.vision.tower_row import LINEAR_BIASES, Tower, learned

STANDARD = ("std_bias", "std_scale")
POST_NORMS = ("attn_post_norm", "mlp_post_norm")
HEADS = {role: f"self_attn.{role}_proj" for role in "qkvo"}
MLP = {role: f"mlp.{role}_proj" for role in ("gate", "up", "down")}
GEMMA4 = {
    "patch": "patch_embedder.input_proj",
    "positions": "patch_embedder.position_embedding_table",
    "layer": "encoder.layers.{}.",
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    **{role: f"{name}.linear" for role, name in (HEADS | MLP).items()},
    **{f"{role}_{bound}": f"{(HEADS | MLP)[role]}.{bound}" for role in BOUNDED for bound in BOUNDS},
    **{role: role for role in STANDARD},
}


def _summed(config: HfConfig) -> Patches:
    """Positions are sums of a row for the column and a row for the line, each from a table of its own."""
    heads, own = config.integer("num_attention_heads", high=1 << 10), config.integer("hidden_size", high=1 << 16)
    for name, value in (("num_key_value_heads", heads), ("head_dim", own // heads)):
        if config.integer(name, value, high=1 << 16) != value:
            raise config.fail(name, f"is not {value}; heads of a tower have keys of their own, and make up its rows")
    if (kind := config.child("rope_parameters").text("rope_type", "axial")) not in ("axial", "default"):
        raise config.fail("rope_parameters", f"has rope_type {kind!r}; only 'axial' is supported")
    count = config.integer("position_embedding_size", high=1 << 20)
    return Patches(square(config, "patch_size", high=256), grid=(2, count), positions="summed", scale=sqrt(own))


def _whole_squares(config: HfConfig) -> Patches:
    """A patch is what a tower's squares of patches are, which there is none to read."""
    size = square(config, "patch_size", high=256) * config.integer("pooling_kernel_size", 3, high=16)
    return Patches(size, grid=(config.integer("mm_posemb_size", high=1 << 20), 2), positions="paired")


def _lines_first(heads: int, head_dim: int) -> NDArray[np.int64]:
    """Rows of heads that turn by column in their first half and by line in their second, each half by pairs
    that are a quarter apart: ours turn by line, then by column, by pairs that are a half apart."""
    quarters = np.arange(heads * head_dim, dtype=np.int64).reshape(heads, 4, -1)
    return quarters[:, [2, 0, 3, 1]].flatten()


GEMMA4_UNIFIED = {
    "patch_norm": "patch_ln1",
    "patch": "patch_dense",
    "patch_out_norm": "patch_ln2",
    "positions": "pos_embedding",
    "embed_norm": "pos_norm",
    "layer": "layers.{}.",
}


def _learned_and_turned(config: HfConfig) -> Patches:
    """A square of learned positions, that of the class token behind them, beside turns by line and column from 1 on."""
    patches = learned(first=1)(config)
    return replace(patches, behind=True, start=1)


def _pairs_apart(heads: int, head_dim: int) -> NDArray[np.int64]:
    """Rows of heads that turn by column in their first half and by line in their second, by neighbours; ours turn by
    line, then by column, by pairs that are a half apart."""
    pairs = np.arange(heads * head_dim, dtype=np.int64).reshape(heads, 2, -1, 2)
    return np.moveaxis(pairs[:, ::-1], 3, 1).flatten()


LLAMA4 = {
    "patch": "patch_embedding.linear",
    "class_token": "class_embedding",
    "positions": "positional_embedding_vlm",
    "embed_norm": "layernorm_pre",
    "final_norm": "layernorm_post",
    "layer": "model.layers.{}.",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **HEADS,
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
BIASED = ("patch_norm", "patch", "patch_out_norm", "embed_norm")
NEWER_TOWERS = {
    "gemma4_vision": Tower(
        Family(
            GEMMA4,
            {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12,
             "hidden_activation": "gelu_pytorch_tanh", "patch_size": 16, "position_embedding_size": 10240,
             "rms_norm_eps": 1e-6, "rope_theta": 100.0},
            required=("patch", "positions", *POST_NORMS, "q_norm", "k_norm"),
            flags={"use_clipped_linears": tuple(f"{role}_{bound}" for role in BOUNDED for bound in BOUNDS),
                   "standardize": STANDARD},
            facts={"attention_scale": 1.0, "normed_values": True},
            spelling=(("hidden_act", "hidden_activation"), ("layer_norm_eps", "rms_norm_eps")),
            orders=dict.fromkeys("qk", lambda s: _lines_first(s.heads, s.head_dim))
            | dict.fromkeys(("q_norm", "k_norm"), lambda s: _lines_first(1, s.head_dim)),
        ),
        _summed, "rms", None, "axes",
    ),
    "gemma4_unified_vision": Tower(
        Family(
            GEMMA4_UNIFIED,
            {"mm_embed_dim": 3840, "mm_posemb_size": 1120, "patch_size": 16, "num_hidden_layers": 0,
             "num_attention_heads": 1, "intermediate_size": 1, "hidden_act": "gelu"},
            required=("positions", *(f"{role}{part}" for role in BIASED for part in ("", ".bias"))),
            spelling=(("hidden_size", "mm_embed_dim"),),
        ),
        _whole_squares, "layer", 1e-5,
    ),
    "llama4_vision_model": Tower(
        Family(
            LLAMA4,
            {"hidden_size": 768, "intermediate_size": 5632, "num_hidden_layers": 34, "num_attention_heads": 16,
             "hidden_act": "gelu", "image_size": 448, "patch_size": 14},
            required=("patch", "class_token", "positions", "embed_norm", "embed_norm.bias", "final_norm.bias",
                      *LINEAR_BIASES),
            orders=dict.fromkeys("qk", lambda s: _pairs_apart(s.heads, s.head_dim)),
        ),
        _learned_and_turned, "layer", 1e-5, "axes", unfolded=True,
    ),
}  # fmt: skip
"""By `model_type` of a `vision_config`; a part of `vision.towers`' table."""
