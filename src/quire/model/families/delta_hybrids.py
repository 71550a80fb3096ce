"""Rows of families whose layers have the gated delta rule in forms of their own, beside attention of several kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.delta_sizes import DeltaSizes
from quire.model.families.hybrids import delta_mixers, delta_sizes, delta_windows, one_rope
from quire.model.families.names import BIAS_FLAGS, OLMO2, POST_NORMS, naked
from quire.model.families.readers import no_rope
from quire.model.families.rope import Rope
from quire.model.families.row import Family, layer_kinds

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


def olmo_hybrid(config: HfConfig) -> Family:
    """OLMo 2's layers, whose norms are behind what they add, between layers of the delta rule, whose norms are before.

    Files of transformers call norms of both as if they were of one kind.
    """
    family = Family(
        OLMO_HYBRID,
        {
            "layer_types": fourth,
            "max_position_embeddings": 65536,
            "linear_num_key_heads": lambda c: c.integer("num_attention_heads"),
            "linear_num_value_heads": lambda c: c.integer("num_attention_heads"),
            "linear_key_head_dim": lambda c: int(0.75 * c.integer("hidden_size") / c.integer("linear_num_key_heads")),
            "linear_value_head_dim": lambda c: 2 * c.integer("linear_key_head_dim"),
            "linear_conv_kernel_dim": 4,
        },
        {"mixers": delta_mixers, "delta": olmo_delta, "windows": delta_windows, "rope": olmo_rope},
        (*ROW_NORMS, *POST_NORMS),
        {"attention_bias": BIAS_FLAGS["attention_bias"]},
    )
    kinds = layer_kinds(family.fill_in(config), config.integer("num_hidden_layers", high=1024))
    attend = [kind == "full_attention" for kind in kinds]
    bare = tuple((role, i) for i, own in enumerate(attend) for role in (PRE_NORMS if own else POST_NORMS))
    layers = {own: "|".join(str(i) for i, attends in enumerate(attend) if attends == own) for own in (True, False)}
    renamed = (
        (True, "feedforward_layer_norm", "post_attention_layernorm"),
        (False, "input_layernorm", "attention_layer_norm"),
        (False, "post_attention_layernorm", "feedforward_layer_norm"),
    )
    return replace(
        family,
        facts={"join": "post_norm", "bare": bare},
        rewrites=(
            *naked(("linear_attn",), ("A_log", "dt_bias")),
            *(
                Rewrite(rf"(.*layers\.(?:{layers[own]})\.){found}\.weight", rf"\1{name}.weight")
                for own, found, name in renamed
            ),
        ),
    )


DELTA_HYBRIDS: Mapping[str, Family | Callable[[HfConfig], Family]] = {"olmo_hybrid": olmo_hybrid}
