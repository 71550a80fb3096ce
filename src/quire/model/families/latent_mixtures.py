"""The rows of the table of families with latent attention whose layers, or experts, are not DeepSeek's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from quire.model.disk.hf_config import HfConfig
from quire.model.families.mixtures import CORRECTED, EXPERTS, SHARED, deepseek, grouped_moe, sigmoid_experts
from quire.model.families.names import CORRECTION, MLP_BIAS, NEXTN, STACKED, without
from quire.model.families.query_scale import QueryScale
from quire.model.families.readers import latent_rope
from quire.model.families.rope import Rope
from quire.model.families.row import Family, Reader
from quire.model.spec import MoE


def glm4_moe_lite(config: HfConfig) -> Family:
    """DeepSeek-V3 with a list of the layers that have experts; without one the first has none."""
    defaults = {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
    }
    family = deepseek(config, defaults, sigmoid_experts(True))
    return replace(
        family,
        names={**family.names, **CORRECTED},
        required=(*family.required, "router_bias"),
        defaults={**family.defaults, **queries(config, 768)},
        rewrites=(CORRECTION, *STACKED),
        mtp=NEXTN,
    )


def queries(config: HfConfig, rank: int) -> dict[str, int | None]:
    """The default of `q_lora_rank`, which a file may set to null."""
    return {"q_lora_rank": None if "q_lora_rank" in config.raw and not config.has("q_lora_rank") else rank}


def dense(config: HfConfig, defaults: dict[str, Any], rank: int) -> Family:
    """Latent attention of which no layer has experts; queries by way of a space of `rank` numbers by default."""
    family = deepseek(config, defaults, sigmoid_experts(True))
    return replace(
        family,
        names=without(family.names, *EXPERTS, *SHARED),
        defaults={**family.defaults, **queries(config, rank)},
        read={field: reader for field, reader in family.read.items() if field != "moe"},
        spelling=(),
        rewrites=(),
    )


def youtu(config: HfConfig) -> Family:
    """DeepSeek-V3 without experts."""
    defaults = {
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    return dense(config, defaults, 1536)


def minicpm3(config: HfConfig) -> Family:
    """Scales of the embedding, of what layers add and of the rows that the head reads (muP, Yang et al. 2022).

    The stream is kept divided by what multiplies the layers' results, as Granite's is (`variants.granite_facts`).
    """
    defaults = {
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": lambda c: c.integer("hidden_size") // c.integer("num_attention_heads"),
        "rope_interleave": False,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }
    family = dense(config, defaults, 768)

    def residual(c: HfConfig, layers: int) -> float:
        return c.number("scale_depth", math.sqrt(layers)) / math.sqrt(layers)

    def output(c: HfConfig, layers: int) -> float:
        hidden = c.integer("hidden_size")
        return float(c.integer("dim_model_base", hidden) / hidden)

    own: dict[str, Reader] = {
        "embed_scale": lambda c, layers: c.number("scale_emb") / residual(c, layers),
        "norm_eps": lambda c, layers: c.number("rms_norm_eps") / residual(c, layers) ** 2,
        "logit_scale": output,
    }
    return replace(family, read={**family.read, **own}, flags={**family.flags, "mlp_bias": MLP_BIAS})


def mistral4_rope(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """Only the shared part of a key turns: the part of a whole head that the rope names is that."""
    field = "rope_scaling" if config.has("rope_scaling") else "rope_parameters"
    p = {name: value for name, value in config.child(field).raw.items() if name != "partial_rotary_factor"}
    return latent_rope(HfConfig({**config.raw, field: p, "partial_rotary_factor": None}, config.where), layers)


def mistral4_scale(config: HfConfig, layers: int) -> QueryScale:
    """Queries grow with the logarithm of how often their position is past the length of the training."""
    p = config.child("rope_scaling" if config.has("rope_scaling") else "rope_parameters")
    weight = p.number("llama_4_scaling_beta", 0.0)
    if not weight:
        return QueryScale()
    return QueryScale(p.integer("original_max_position_embeddings"), weight, 0, (True,) * layers)


def mistral4_experts(config: HfConfig, layers: int) -> MoE:
    """Softmax scores; a group counts by its best two."""
    return grouped_moe(config, layers, "softmax", config.flag("norm_topk_prob", True), 2, limited=True)


def mistral4(config: HfConfig) -> Family:
    """DeepSeek-V3 with softmax scores, and queries that grow with their position."""
    defaults = {
        "max_position_embeddings": 1048576,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 2048,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    }
    family = deepseek(config, defaults, mistral4_experts)
    return replace(
        family,
        defaults={**family.defaults, **queries(config, 1024)},
        read={**family.read, "rope": mistral4_rope, "query_scale": mistral4_scale},
    )


LATENT_MIXTURES: dict[str, Family | Callable[[HfConfig], Family]] = {
    "glm4_moe_lite": glm4_moe_lite,
    "youtu": youtu,
    "minicpm3": minicpm3,
    "mistral4": mistral4,
}
