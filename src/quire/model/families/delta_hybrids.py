"""Rows of families whose layers have the gated delta rule in forms of their own, beside attention of several kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.delta_sizes import DeltaSizes
from quire.model.families.hybrids import DELTA_READS, delta_sizes, one_rope
from quire.model.families.kimi import NAMES as KIMI
from quire.model.families.kimi import SPELLING
from quire.model.families.mixtures import (
    CORRECTED,
    EXPERTS,
    LATENT_SIZES,
    LOCAL,
    SHARED,
    SMALL_QUERIES,
    layers_ahead,
    sigmoid_experts,
)
from quire.model.families.names import BIAS_FLAGS, OLMO2, POST_NORMS, STACKED, naked
from quire.model.families.newer_mixtures import corrections_called
from quire.model.families.readers import LATENT_READS, no_rope
from quire.model.families.rope import Rope
from quire.model.families.row import Family, layer_kinds
from quire.ops.convolution import MOST_TAPS

PRE_NORMS = ("attn_norm", "mlp_norm")
ROW_NORMS = ("q_row_norm", "k_row_norm")
OLMO_HYBRID = OLMO2 | {
    "attn_norm": "attention_layer_norm",
    "mlp_norm": "feedforward_layer_norm",
    "delta_q": "linear_attn.q_proj",
    "delta_k": "linear_attn.k_proj",
    "delta_v": "linear_attn.v_proj",
    "delta_z": "linear_attn.g_proj",
    "delta_b": "linear_attn.b_proj",
    "delta_a": "linear_attn.a_proj",
    "delta_conv_q": "linear_attn.q_conv1d",
    "delta_conv_k": "linear_attn.k_conv1d",
    "delta_conv_v": "linear_attn.v_conv1d",
    "delta_decay": "linear_attn.A_log",
    "delta_bias": "linear_attn.dt_bias",
    "delta_scale": "linear_attn.o_norm",
    "delta_out": "linear_attn.o_proj",
}


def fourth(config: HfConfig) -> list[str]:
    """`layer_types` where config.json has none: every fourth layer attends, or the last alone."""
    layers = config.integer("num_hidden_layers", high=1024)
    attends = range(3, layers, 4) if layers > 3 else (layers - 1,)
    return ["full_attention" if i in attends else "linear_attention" for i in range(layers)]


def olmo_rope(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """Attention turns by positions only where the file has a base for it."""
    given = config.child("rope_scaling" if config.has("rope_scaling") else "rope_parameters")
    return (one_rope if given.has("rope_theta") or config.has("rope_theta") else no_rope)(config, layers)


def olmo_delta(config: HfConfig, layers: int) -> DeltaSizes:
    """Taps of queries, keys and values apart; beta up to 2 where `linear_allow_neg_eigval`."""
    scale = 2.0 if config.flag("linear_allow_neg_eigval", True) else 1.0
    return replace(delta_sizes(config, layers), apart=True, eps=1e-5, beta_scale=scale)


def with_norms_by_kind(family: Family, config: HfConfig) -> Family:
    """`family` whose layers that attend have norms behind what they add, and the others before.

    Files of transformers call norms of both as if they were of one kind.
    """
    kinds = layer_kinds(family.fill_in(config), config.integer("num_hidden_layers", high=1024))
    attend = [kind == "full_attention" for kind in kinds]
    bare = tuple((role, i) for i, own in enumerate(attend) for role in (PRE_NORMS if own else POST_NORMS))
    layers = {own: "|".join(str(i) for i, attends in enumerate(attend) if attends == own) for own in (True, False)}
    renamed = (
        (True, "feedforward_layer_norm", "post_attention_layernorm"),
        (False, "input_layernorm", "attention_layer_norm"),
        (False, "post_attention_layernorm", "feedforward_layer_norm"),
    )
    rewrites = (
        Rewrite(rf"(.*layers\.(?:{layers[own]})\.){found}\.weight", rf"\1{name}.weight") for own, found, name in renamed
    )
    facts = {"join": "post_norm", "bare": bare}
    return replace(family, facts=facts, rewrites=(*naked(("linear_attn",), ("A_log", "dt_bias")), *rewrites))


def olmo_hybrid(config: HfConfig) -> Family:
    """OLMo 2's layers between layers of the delta rule."""
    family = Family(
        OLMO_HYBRID,
        {"layer_types": fourth, "max_position_embeddings": 65536,
         "linear_num_key_heads": lambda c: c.integer("num_attention_heads"),
         "linear_num_value_heads": lambda c: c.integer("num_attention_heads"),
         "linear_key_head_dim": lambda c: int(0.75 * c.integer("hidden_size") / c.integer("linear_num_key_heads")),
         "linear_value_head_dim": lambda c: 2 * c.integer("linear_key_head_dim"), "linear_conv_kernel_dim": 4},
        DELTA_READS | {"delta": olmo_delta, "rope": olmo_rope},
        (*ROW_NORMS, *POST_NORMS),
        {"attention_bias": BIAS_FLAGS["attention_bias"]},
    )  # fmt: skip
    return with_norms_by_kind(family, config)


LING = {role: name.replace("self_attn.", "attention.") for role, name in KIMI.items() if role not in SMALL_QUERIES} | {
    "embed": "model.word_embeddings",
    "head_gate": "attention.g_proj",
    "o": "attention.dense",
    "delta_a": "attention.f_proj",
    "delta_z": "attention.g_proj",
    "delta_out": "attention.dense",
} | EXPERTS | SHARED | CORRECTED  # fmt: skip
LING_WRITTEN = (
    Rewrite(r"model\.embed_tokens\.(.+)", r"model.word_embeddings.\1"),
    *naked(("attention",), ("A_log", "dt_bias")),
    Rewrite(r"(.*\.)self_attn\.forget_gate\.(A_log|dt_bias)", r"\1attention.\2.weight"),
    Rewrite(r"(.*\.)self_attn\.forget_gate\.(.+)", r"\1attention.\2"),
    Rewrite(r"(.*\.)(?:self_attn|attention)\.conv1d\.weight", r"\1attention.{}_conv1d.weight", parts=("q", "k", "v")),
    Rewrite(r"(.*\.)(?:self_attn|attention)\.o_proj\.(.+)", r"\1attention.dense.\2"),
    Rewrite(r"(.*\.)self_attn\.(.+)", r"\1attention.\2"),
    corrections_called("mlp.gate.expert_bias"),
    *STACKED,
)
"""Names of modules, seen as those of the release."""


def ling_kinds(config: HfConfig) -> list[str]:
    """`layer_types` where config.json has none: the last layer of every `layer_group_size` attends."""
    every, layers = config.integer("layer_group_size", 6), config.integer("num_hidden_layers", high=1024)
    return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]


def ling_delta(config: HfConfig, layers: int) -> DeltaSizes:
    """Kimi's rule, each of whose gates is of one matrix; decays have a bound unless `kda_safe_gate` is false."""
    heads, width = config.integer("num_attention_heads", high=4096), config.integer("linear_head_dim", high=4096)
    taps = config.integer("linear_conv_kernel_dim", low=2, high=MOST_TAPS)
    bound = config.number("kda_lower_bound", -5.0, low=-1e4, high=0.0) if config.flag("kda_safe_gate", True) else 0.0
    sizes = DeltaSizes(heads, heads, width, width, taps, by_channel=True, apart=True, gate="sigmoid")
    return replace(sizes, lower_bound=bound)


LING_SIZES: dict[str, Callable[[HfConfig], int]] = {
    "linear_head_dim": lambda c: c.integer("head_dim", 128, high=4096),
    "linear_key_head_dim": lambda c: c.integer("linear_head_dim"),
    "linear_conv_kernel_dim": lambda c: c.integer("short_conv_kernel_size", 4),
}
"""Of the delta rule, by fields of attention."""


def ling(config: HfConfig) -> Family:
    """Ling 3.0: latent attention with a gate for each head, between layers of Kimi's rule."""
    return Family(
        LING,
        LATENT_SIZES | {
            "rms_norm_eps": 1e-6, "rope_theta": 6e6, "max_position_embeddings": 262144, "q_lora_rank": None,
            "num_experts": 512, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 768,
            "n_group": 8, "topk_group": 4, "first_k_dense_replace": 2, "routed_scaling_factor": 2.5,
            "layer_types": ling_kinds, **LING_SIZES},
        LATENT_READS | DELTA_READS | {"delta": ling_delta, "moe": sigmoid_experts(True)},
        ("kv_a", "kv_a_norm", "kv_b", "head_gate", "router_bias"),
        spelling=(*LOCAL, *SPELLING), rewrites=LING_WRITTEN, skipped=layers_ahead(config),
    )  # fmt: skip


DELTA_HYBRIDS: Mapping[str, Family | Callable[[HfConfig], Family]] = {
    "olmo_hybrid": olmo_hybrid,
    "bailing_hybrid": ling,
}
