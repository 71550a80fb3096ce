"""The rows of the table of families with latent attention whose layers, or experts, are not DeepSeek's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.mixtures import (
    CORRECTED,
    EXPERTS,
    LATENT_SIZES,
    LATENTS,
    SHARED,
    SMALL_QUERIES,
    deepseek,
    grouped_moe,
    sigmoid_experts,
)
from quire.model.families.names import CORRECTION, GATE_UP, LLAMA, MLP_BIAS, NEXTN, STACKED, without
from quire.model.families.query_scale import QueryScale
from quire.model.families.readers import (
    LATENT_READS,
    TWO_OF_EACH,
    latent_rope,
    only,
    read_mla,
    read_moe,
)
from quire.model.families.rope import Rope
from quire.model.families.row import Family, Reader
from quire.model.spec import MLA, MoE


def glm4_moe_lite(config: HfConfig) -> Family:
    """DeepSeek-V3 with a list of the layers that have experts; without one the first has none."""
    own = {"rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "qk_nope_head_dim": 192, "v_head_dim": 256,
           "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 1536,
           "first_k_dense_replace": 1, "routed_scaling_factor": 1.8}  # fmt: skip
    family = deepseek(config, LATENT_SIZES | own, sigmoid_experts(True))
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
    return dense(config, LATENT_SIZES | {"tie_word_embeddings": True, "max_position_embeddings": 131072}, 1536)


def added_share(config: HfConfig, layers: int) -> float:
    """What multiplies what MiniCPM 3's layers add."""
    return config.number("scale_depth", math.sqrt(layers)) / math.sqrt(layers)


MINICPM3_READS: dict[str, Reader] = {
    "embed_scale": lambda c, layers: c.number("scale_emb") / added_share(c, layers),
    "norm_eps": lambda c, layers: c.number("rms_norm_eps") / added_share(c, layers) ** 2,
    "logit_scale": lambda c, layers: c.integer("dim_model_base", c.integer("hidden_size")) / c.integer("hidden_size"),
}
"""Scales of the embedding, of what layers add and of the rows that the head reads (muP, Yang et al. 2022). The stream
is kept divided by what multiplies the layers' results, as Granite's is (`variants.granite_facts`)."""


def minicpm3(config: HfConfig) -> Family:
    """Latent attention and an MLP, with muP's scales."""
    own = {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 32768,
           "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
           "v_head_dim": lambda c: c.integer("hidden_size") // c.integer("num_attention_heads"),
           "rope_interleave": False, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}  # fmt: skip
    family = dense(config, own, 768)
    return replace(family, read={**family.read, **MINICPM3_READS}, flags={**family.flags, "mlp_bias": MLP_BIAS})


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
    defaults = {"max_position_embeddings": 1048576, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
                "v_head_dim": 128, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 4,
                "moe_intermediate_size": 2048,
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0,
                                    "original_max_position_embeddings": 8192, "mscale_all_dim": 1.0, "mscale": 1.0,
                                    "llama_4_scaling_beta": 0.1}}  # fmt: skip
    family = deepseek(config, defaults, mistral4_experts)
    return replace(
        family,
        defaults={**family.defaults, **queries(config, 1024)},
        read={**family.read, "rope": mistral4_rope, "query_scale": mistral4_scale},
    )


IN_PARTS = {
    **{role: name.replace("self_attn.", "self_attn.{part}.") for role, name in (LATENTS | {"o": LLAMA["o"]}).items()},
    **{role: LLAMA[role].replace("mlp.", "mlps.{part}.") for role in ("gate", "up", "down")},
    **{role: LLAMA[role] + ".{part}" for role in ("attn_norm", "mlp_norm")},
}
LONGCAT = (
    without(LLAMA, "q", "k", "v", "q_norm", "k_norm")
    | EXPERTS
    | IN_PARTS
    | {"router": "mlp.router.classifier", "router_bias": "mlp.router.correction"}
)
DRAWN = (r"(.*\.mlp\.router)\.e_score_correction_bias", r"\1.correction.weight")


def longcat_experts(config: HfConfig, layers: int) -> MoE:
    """Experts beside the first of a layer's two MLPs, and choices that give back the row."""
    kind = config.text("zero_expert_type", "identity")
    if kind != "identity":
        raise config.fail("zero_expert_type", f"{kind!r} is not supported; only 'identity' is")
    idle = config.integer("zero_expert_num", 0, low=0, high=1024)
    return replace(read_moe()(config, layers), sparse=(True, False) * layers, late=True, idle=idle)


def longcat_mla(config: HfConfig, layers: int) -> MLA:
    """Sizes, and factors of both spaces, by which they are as long as the stream."""
    mla, hidden = read_mla(config, layers), config.integer("hidden_size")
    by_flag = (("mla_scale_q_lora", mla.q_rank), ("mla_scale_kv_lora", mla.rank))
    q_factor, factor = (math.sqrt(hidden / rank) if config.flag(flag, True) else 1.0 for flag, rank in by_flag)
    return replace(mla, q_factor=q_factor, factor=factor)


def weights_of_idle_choices(config: HfConfig) -> tuple[str, ...]:
    """Endings of names of experts that older files have for choices that give back the row."""
    experts = config.integer("n_routed_experts", 512, high=1024)
    unused = range(experts, experts + config.integer("zero_expert_num", 256, low=0, high=1024))
    return tuple(f".mlp.experts.{e}.{part}.weight" for e in unused for part in (*GATE_UP, "down_proj"))


def longcat_flash(config: HfConfig) -> Family:
    """A layer of the files is two here, each with latent attention and an MLP."""
    only(config, router_bias=False)
    return Family(
        LONGCAT,
        LONGCAT_DEFAULTS,
        LATENT_READS | TWO_OF_EACH | LONGCAT_READS,
        (*SMALL_QUERIES, "kv_a", "kv_a_norm", "kv_b", "router_bias"),
        {"attention_bias": ("q_a.bias", "kv_a.bias", "o.bias")},
        {"join": "passing"},
        LONGCAT_SPELLING,
        buffers=weights_of_idle_choices(config), skipped=("model.mtp.",),
        rewrites=(Rewrite(*DRAWN, release=r"\1.e_score_correction_bias"), *STACKED),
    )  # fmt: skip


LONGCAT_READS: dict[str, Reader] = {
    "windows": lambda config, layers: (0,) * 2 * layers,
    "rope": lambda config, layers: latent_rope(config, 2 * layers),
    "mla": longcat_mla,
    "moe": longcat_experts,
}
LONGCAT_DEFAULTS = LATENT_SIZES | {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e7,
    "max_position_embeddings": 131072,
    "q_lora_rank": 1536,
    "head_dim": lambda c: c.integer("qk_rope_head_dim"),
    "n_routed_experts": 512,
    "zero_expert_num": 256,
    "moe_topk": 12,
    "routed_scaling_factor": 6.0,
}
LONGCAT_SPELLING = (
    ("num_hidden_layers", "num_layers"),
    ("intermediate_size", "ffn_hidden_size"),
    ("moe_intermediate_size", "expert_ffn_hidden_size"),
    ("num_experts", "n_routed_experts"),
    ("num_experts_per_tok", "moe_topk"),
)
LATENT_MIXTURES: dict[str, Family | Callable[[HfConfig], Family]] = {
    "glm4_moe_lite": glm4_moe_lite,
    "youtu": youtu,
    "minicpm3": minicpm3,
    "mistral4": mistral4,
    "longcat_flash": longcat_flash,
}
