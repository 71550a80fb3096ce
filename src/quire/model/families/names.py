"""What families call their tensors on disk: role -> name, `layer` the prefix of a layer's tensors.

Beside them, which biases go together, and GPT-2's spelling of config.json, which others share. Tools write experts
under names and in forms of their own: transformers' modules stack the experts of a layer, gate and up in one. Saved by
transformers they go back to the release's form; other tools write the modules' own, or take experts apart and keep the
modules' names (llm-compressor).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from quire.model.disk.renamed_tensors import Rewrite


def without(names: Mapping[str, str], *roles: str) -> dict[str, str]:
    """`names` less those of `roles`."""
    return {role: name for role, name in names.items() if role not in roles}


LLAMA = {
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "layer": "model.layers.{}.",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
GPT2 = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
    "layer": "transformer.h.{}.",
    "attn_norm": "ln_1",
    "mlp_norm": "ln_2",
    "qkv": "attn.c_attn",
    "o": "attn.c_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
BLOOM = {
    "embed": "transformer.word_embeddings",
    "embed_norm": "transformer.word_embeddings_layernorm",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
    "layer": "transformer.h.{}.",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "qkv": "self_attention.query_key_value",
    "o": "self_attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
NEOX = {
    "embed": "gpt_neox.embed_in",
    "final_norm": "gpt_neox.final_layer_norm",
    "head": "embed_out",
    "layer": "gpt_neox.layers.{}.",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "qkv": "attention.query_key_value",
    "o": "attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
GPTJ = {
    "embed": "transformer.wte",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
    "layer": "transformer.h.{}.",
    "attn_norm": "ln_1",
    "q": "attn.q_proj",
    "k": "attn.k_proj",
    "v": "attn.v_proj",
    "o": "attn.out_proj",
    "up": "mlp.fc_in",
    "down": "mlp.fc_out",
}
OPT = {
    "embed": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "project_in": "model.decoder.project_in",
    "project_out": "model.decoder.project_out",
    "final_norm": "model.decoder.final_layer_norm",
    "head": "lm_head",
    "layer": "model.decoder.layers.{}.",
    "attn_norm": "self_attn_layer_norm",
    "mlp_norm": "final_layer_norm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.out_proj",
    "up": "fc1",
    "down": "fc2",
}
MPT = {
    "embed": "transformer.wte",
    "final_norm": "transformer.norm_f",
    "head": "lm_head",
    "layer": "transformer.blocks.{}.",
    "attn_norm": "norm_1",
    "mlp_norm": "norm_2",
    "qkv": "attn.Wqkv",
    "o": "attn.out_proj",
    "up": "ffn.up_proj",
    "down": "ffn.down_proj",
}
T5_ENCODER = {
    "encoder_final_norm": "encoder.final_layer_norm",
    "encoder_relative_bias": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "encoder_layer": "encoder.block.{}.layer.",
    "encoder_attn_norm": "0.layer_norm",
    "encoder_q": "0.SelfAttention.q",
    "encoder_k": "0.SelfAttention.k",
    "encoder_v": "0.SelfAttention.v",
    "encoder_o": "0.SelfAttention.o",
    "encoder_mlp_norm": "1.layer_norm",
    "encoder_gate": "1.DenseReluDense.wi_0",
    "encoder_up": "1.DenseReluDense.wi_1",
    "encoder_down": "1.DenseReluDense.wo",
}
T5 = T5_ENCODER | {
    "embed": "shared",
    "final_norm": "decoder.final_layer_norm",
    "head": "lm_head",
    "relative_bias": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "layer": "decoder.block.{}.layer.",
    "attn_norm": "0.layer_norm",
    "q": "0.SelfAttention.q",
    "k": "0.SelfAttention.k",
    "v": "0.SelfAttention.v",
    "o": "0.SelfAttention.o",
    "cross_norm": "1.layer_norm",
    "cross_q": "1.EncDecAttention.q",
    "cross_k": "1.EncDecAttention.k",
    "cross_v": "1.EncDecAttention.v",
    "cross_o": "1.EncDecAttention.o",
    "mlp_norm": "2.layer_norm",
    "gate": "2.DenseReluDense.wi_0",
    "up": "2.DenseReluDense.wi_1",
    "down": "2.DenseReluDense.wo",
}
OLMO2 = without(LLAMA, "attn_norm", "mlp_norm", "q_norm", "k_norm") | {
    "attn_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
    "q_row_norm": "self_attn.q_norm",
    "k_row_norm": "self_attn.k_norm",
}
INTERNLM2 = {
    "embed": "model.tok_embeddings",
    "final_norm": "model.norm",
    "head": "output",
    "layer": "model.layers.{}.",
    "attn_norm": "attention_norm",
    "mlp_norm": "ffn_norm",
    "qkv": "attention.wqkv",
    "o": "attention.wo",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
}
GPT_NEO = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
    "layer": "transformer.h.{}.",
    "attn_norm": "ln_1",
    "mlp_norm": "ln_2",
    "q": "attn.attention.q_proj",
    "k": "attn.attention.k_proj",
    "v": "attn.attention.v_proj",
    "o": "attn.attention.out_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
GEMMA = LLAMA | {
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}

QKV_BIAS = ("q.bias", "k.bias", "v.bias")
MLP_BIAS = ("gate.bias", "up.bias", "down.bias")
ALL_MLP_BIAS = (*MLP_BIAS, *(f"shared_{part}" for part in MLP_BIAS))
"""Those of experts that every token takes, too."""
BIAS_FLAGS = {"attention_bias": (*QKV_BIAS, "o.bias"), "mlp_bias": MLP_BIAS}
NEOX_BIASES = ("qkv.bias", "o.bias", "up.bias", "down.bias")
NORM_BIASES = ("attn_norm.bias", "mlp_norm.bias", "final_norm.bias")
GPT2_SPELLING = (
    ("hidden_size", "n_embd"),
    ("num_hidden_layers", "n_layer"),
    ("num_attention_heads", "n_head"),
    ("max_position_embeddings", "n_positions"),
    ("intermediate_size", "n_inner"),
    ("hidden_act", "activation_function"),
    ("rms_norm_eps", "layer_norm_epsilon"),
)
MASKS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
POST_NORMS = ("attn_post_norm", "mlp_post_norm")


GATE_UP = ("gate_proj", "up_proj")


def naked(modules: Iterable[str], vectors: Iterable[str]) -> tuple[Rewrite, ...]:
    """Vectors of layers' `modules` whose names on disk end with what they are, seen as weights of that name."""
    return tuple(
        Rewrite(rf"(.*\.{module})\.{vector}", rf"\1.{vector}.weight", release=rf"\1.{vector}")
        for module in modules
        for vector in vectors
    )


STACKED = (
    Rewrite(r"(.*\.mlp\.experts)\.gate_up_proj", r"\1.{}.{}.weight", True, parts=GATE_UP),
    Rewrite(r"(.*\.mlp\.experts)\.down_proj", r"\1.{}.down_proj.weight", True),
)
"""Gate above up."""
MIXTRAL_WRITTEN = (
    Rewrite(r"(.*)\.mlp\.experts\.gate_up_proj", r"\1.block_sparse_moe.experts.{}.{}.weight", True, parts=("w1", "w3")),
    Rewrite(r"(.*)\.mlp\.experts\.down_proj", r"\1.block_sparse_moe.experts.{}.w2.weight", True),
    Rewrite(r"(.*)\.mlp\.(?:gate|router)\.weight", r"\1.block_sparse_moe.gate.weight"),
    *(
        Rewrite(rf"(.*)\.(?:block_sparse_moe|mlp)\.(experts\.\d+)\.{module}_proj(\..+)",
                rf"\1.block_sparse_moe.\2.{name}\3")
        for module, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    ),
)  # fmt: skip
"""For families whose release calls the block, its router and its matrices otherwise than the modules do."""
GPT_OSS_WRITTEN = (
    Rewrite(r"(.*\.self_attn\.sinks)", r"\1.weight", release=r"\1"),
    *(
        Rewrite(
            rf"(.*\.mlp\.experts)\.{matrix}{ending}",
            rf"\1.{{}}.{own}.{part}",
            True,
            turned,
            names,
            bool(names),
            rf"\1.{matrix}{ending}" if "(" not in ending else "",
        )
        for matrix, own, names in (("gate_up_proj", "{}", GATE_UP), ("down_proj", "down_proj", ()))
        for ending, part, turned in (("", "weight", True), ("_bias", "bias", False), ("_(blocks|scales)", r"\2", False))
    ),
)
"""Stacked and turned in the release, where gate and up take rows in turn."""
CORRECTION = Rewrite(
    r"(.*\.mlp)\.gate\.e_score_correction_bias",
    r"\1.gate_correction.weight",
    release=r"\1.gate.e_score_correction_bias",
)
ERNIE_CORRECTION = Rewrite(
    r"(.*\.mlp)\.(?:gate\.)?moe_statics\.e_score_correction_bias",
    r"\1.gate_correction.weight",
    stacked=True,
    release=r"\1.moe_statics.e_score_correction_bias",
)


@dataclass(frozen=True)
class MtpNames:
    """What files of a family call the parts of a layer for multi-token prediction (`families.mtp`).

    `beginning`: of all names, "" where they begin as those of a layer behind the model's last do. The others follow it:
    `layer` before the names of a layer's roles, `join` of the matrix, and the norms. `copies`: beginnings of a table
    of tokens and of a head, which are the model's own once more. `hidden_first`: the join reads [hidden row, embedding]
    instead of [embedding, hidden row]. `roles`: names of the layer's roles, where they are not those of a layer.
    `windowed`: the layer attends as those with a window do, or as those without one; None: as the last that attends.
    """

    beginning: str
    layer: str
    join: str
    token_norm: str
    hidden_norm: str
    final_norm: str
    copies: tuple[str, ...] = ()
    hidden_first: bool = False
    roles: Mapping[str, str] = field(default_factory=dict)
    windowed: bool | None = None


OWN_MTP = MtpNames("mtp.", "layers.0.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
NEXTN = MtpNames("", "", "eh_proj", "enorm", "hnorm", "shared_head.norm", ("embed_tokens.", "shared_head.head."))
FINAL_NEXTN = replace(NEXTN, final_norm="final_layernorm")
GGUF_NEXTN = MtpNames(
    *("", "", "nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm"),
    copies=("nextn.embed_tokens.", "nextn.shared_head_head."),
)
GGUF_FINAL_NEXTN = replace(GGUF_NEXTN, final_norm="layer_output_norm")
