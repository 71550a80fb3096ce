"""Tiny models whose layers attend to tokens that an indexer chooses, by the options of transformers."""

from __future__ import annotations

from typing import Any

from model_variants import LATENT_GROUPS, LATENT_SIZES
from paged_model import YARN

INDEXER = {"index_n_heads": 8, "index_head_dim": 16}
SIZES = LATENT_SIZES | INDEXER
SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": ("deepseek_v32", SIZES | LATENT_GROUPS | {"index_topk": 6}),
    "deepseek_v32_yarn": (
        "deepseek_v32",
        SIZES | LATENT_GROUPS | {"index_topk": 4, "attention_bias": True, "rope_parameters": YARN},
    ),
    "glm_moe_dsa": ("glm_moe_dsa", SIZES | {"index_topk": 6}),
    "glm_moe_dsa_shared": (
        "glm_moe_dsa",
        SIZES | {"index_topk": 5, "num_hidden_layers": 4, "indexer_types": ["full", "shared", "shared", "full"],
                 "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    ),
}  # fmt: skip
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32_short": ("deepseek_v32", SIZES | LATENT_GROUPS),
    "glm_moe_dsa_short": ("glm_moe_dsa", SIZES),
}
"""Of sequences shorter than what they choose."""
