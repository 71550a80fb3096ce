"""GGUF's names: what the format calls roles and fields of config.json, and how each architecture is read.
See docs/design/weight-formats.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.model.disk.gguf_layers import Kinds, by_periods, one_part, without_heads
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.mixers.delta import TILED
from quire.model.spec import ModelSpec

NAMES = {
    "embed": "token_embd",
    "positions": "position_embd",
    "embed_norm": "token_embd_norm",
    "final_norm": "output_norm",
    "head": "output",
    "layer": "blk.{}.",
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "qkv": "attn_qkv",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "attn_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "gate_up": "ffn_up",
    "down": "ffn_down",
    "mlp_post_norm": "post_ffw_norm",
    "sinks": "attn_sinks",
    "conv_in": "shortconv.in_proj",
    "conv": "shortconv.conv",
    "conv_out": "shortconv.out_proj",
    "q_gate": "attn_q",
    "delta_qkv": "attn_qkv",
    "delta_z": "attn_gate",
    "delta_qkvz": "ssm_in",
    "delta_b": "ssm_beta",
    "delta_a": "ssm_alpha",
    "delta_ba": "ssm_ba",
    "delta_conv": "ssm_conv1d",
    "delta_decay": "ssm_a",
    "delta_bias": "ssm_dt",
    "delta_scale": "ssm_norm",
    "delta_out": "ssm_out",
    "scan_in": "ssm_in",
    "scan_conv": "ssm_conv1d",
    "scan_decay": "ssm_a",
    "scan_skip": "ssm_d",
    "scan_bias": "ssm_dt",
    "scan_scale": "ssm_norm",
    "scan_out": "ssm_out",
    "channel_in": "ssm_in",
    "channel_conv": "ssm_conv1d",
    "channel_read": "ssm_x",
    "channel_steps": "ssm_dt",
    "channel_decay": "ssm_a",
    "channel_skip": "ssm_d",
    "channel_dt_scale": "ssm_dt_norm",
    "channel_b_scale": "ssm_b_norm",
    "channel_c_scale": "ssm_c_norm",
    "channel_out": "ssm_out",
    "router": "ffn_gate_inp",
    "router_bias": "exp_probs_b",
    "expert_gate": "ffn_gate_exps.{}",
    "expert_up": "ffn_up_exps.{}",
    "expert_down": "ffn_down_exps.{}",
    "expert_enter": "ffn_latent_down",
    "expert_leave": "ffn_latent_up",
    "shared_switch": "ffn_gate_inp_shexp",
    "shared_gate": "ffn_gate_shexp",
    "shared_up": "ffn_up_shexp",
    "shared_down": "ffn_down_shexp",
}
"""Role -> name, the same for almost every architecture. A fused gate and up is called up."""
BIASES = ("router_bias", "delta_bias", "scan_bias")
"""Roles whose one tensor the format calls a bias."""
PARTED = {"delta_qkvz": ("delta_qkv", "delta_z")}
"""Matrices of folders -> what is in their place; older files have them as they are."""
NAKED = ("delta_decay", "scan_decay", "scan_skip", "channel_decay", "channel_skip")
"""Roles whose one tensor has the name of the role alone."""
REWRITES = (
    Rewrite(r"(blk\.\d+\.ffn_(?:gate|up|down)_exps)\.(\w+)", r"\1.{}.\2", stacked=True),
    *(Rewrite(rf"(blk\.\d+\.{name})\.bias", r"\1.weight") for name in sorted({NAMES[role] for role in BIASES})),
    *(Rewrite(rf"(blk\.\d+\.{name})", r"\1.weight") for name in sorted({NAMES[role] for role in NAKED})),
)
"""A layer's experts lie in one tensor for each matrix."""
FIELDS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "rope_theta": "rope.freq_base",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "num_dense_layers": "leading_dense_block_count",
    "conv_L_cache": "shortconv.l_cache",
}
"""Field of config.json -> key under the architecture's name. Families spell the number of experts in two ways."""
DELTA_FIELDS = {
    "full_attention_interval": "full_attention_interval",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
"""Fields of the gated delta rule."""
INNER = "ssm.inner_size"
"""Numbers of all heads that scan, or of all value heads of the gated delta rule."""
NORMED = "ssm.dt_b_c_rms"
"""Whether B, C and time steps are normed."""
RECURRENT = "attention.recurrent_layers"
NEXTN = "nextn_predict_layers"
"""Layers behind the model's own, which predict further tokens."""
KV_HEADS = "num_key_value_heads"
WIDTH = "intermediate_size"
ROPE_FIELDS = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "attention_factor": "rope.scaling.attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
WINDOW = ("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa")
READ_BELOW = frozenset({
    "vocab_size", "attention.value_length", "rope.dimension_count", "rope.scaling.type", "attention.causal",
    "rope.scaling.finetuned", "tensor_data_layout", *FIELDS.values(), *ROPE_FIELDS.values(),
})  # fmt: skip
"""Keys that are read for every architecture, or change nothing; any other may be a feature that is not here."""
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


@dataclass(frozen=True)
class Architecture:
    """How `general.architecture` is read.

    `model_type`: row of the families table. `interleaved`: the converter permuted the rows of queries and keys.
    `extra`: further keys it has. `windowed` and `mixture`: the row for files with a sliding window or with experts, if
    not the same. `large`: layers of the one size whose attention scale is that of hidden / heads, not of a head,
    which no key records. `names`: roles that are not called as elsewhere. `facts`: fields of config.json that have no
    key. `fixed`: keys of which one value is known. `kinds`: what each layer is, where a key has a number for each.
    `spelling`: fields that the family calls otherwise. `fields`: further fields of config.json, and their keys.
    `orders`: where our rows and columns lie (`Family.order`). `rates`: vectors that files have as -exp. `written`: keys
    that others need, and no reader here.

    `defaults`: fields of config.json where there is no key. `quotient`: the second field is `INNER` over the first.
    `told`: flags of config.json, and what the names of tensors have in them where one is true. `normed`: the row for
    files that say `NORMED`. `rewrites`: those that go before all. `turns`: heads turn by positions. `required`: roles
    that others may lack. `read_only`: files of it are not written.
    """

    model_type: str
    interleaved: bool = False
    extra: tuple[str, ...] = ()
    windowed: str = ""
    mixture: str = ""
    large: int = 0
    names: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    kinds: Kinds | None = None
    spelling: tuple[tuple[str, str], ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    orders: Mapping[str, Callable[[ModelSpec], NDArray[np.int64]]] = field(default_factory=dict)
    rates: tuple[str, ...] = ()
    written: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    quotient: tuple[str, str] | None = None
    told: Mapping[str, str] = field(default_factory=dict)
    normed: str = ""
    rewrites: tuple[Rewrite, ...] = ()
    turns: bool = True
    required: tuple[str, ...] = ()
    read_only: bool = False

    @property
    def rows(self) -> tuple[str, ...]:
        """Rows of the families table that its files may have."""
        return tuple(row for row in (self.model_type, self.windowed, self.mixture, self.normed) if row)

    @property
    def known(self) -> frozenset[str]:
        """Keys below the architecture's name that are read of its files."""
        return READ_BELOW.union(self.extra, self.fixed, self.fields.values(), self.written)


LFM2 = Architecture(
    "lfm2",
    names={"final_norm": "token_embd_norm"},
    facts={"block_auto_adjust_ff_dim": False},
    kinds=without_heads("conv"),
    spelling=(("rms_norm_eps", "norm_eps"),),
)
SECTIONS = {"rope.dimension_sections": np.array([11, 11, 10, 0], np.int32)}
"""How many pairs turn by time, height and width: of text, all turn by one position."""
QWEN3_NEXT = Architecture(
    "qwen3_next",
    extra=(INNER, RECURRENT, NEXTN),
    names={"mlp_norm": "post_attention_norm"},
    facts={"norm_topk_prob": True},
    fields=DELTA_FIELDS,
    quotient=("linear_num_value_heads", "linear_value_head_dim"),
    rates=("delta_decay",),
)
QWEN3_5 = replace(QWEN3_NEXT, model_type="qwen3_5_text", facts={}, orders=TILED, written=SECTIONS)
SIGMOID = 2
"""Of the format's functions by which experts are scored."""


def interleaved_heads(heads: Callable[[ModelSpec], int]) -> Callable[[ModelSpec], NDArray[np.int64]]:
    """Where the rows of heads lie whose halves take turns, although nothing turns them."""

    def order(spec: ModelSpec) -> NDArray[np.int64]:
        rows = np.arange(heads(spec) * spec.head_dim, dtype=np.int64)
        return rows.reshape(heads(spec), -1, 2).transpose(0, 2, 1).reshape(-1)

    return order


SCAN_FIELDS = {
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_state": "ssm.state_size",
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_ssm": INNER,
}
"""Fields of a scan of heads."""
CONV_BIAS = ".ssm_conv1d.bias"
"""In the name of a tensor where convolutions have biases."""
GRANITE_HYBRID = Architecture(
    "granitemoehybrid",
    defaults={"num_local_experts": 0},
    fixed={"rope.scaling.finetuned": False},
    kinds=without_heads("linear_attention"),
    spelling=(("shared_expert_intermediate_size", "shared_intermediate_size"),),
    fields=SCAN_FIELDS
    | {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    },
    orders={"q": interleaved_heads(lambda s: s.heads), "k": interleaved_heads(lambda s: s.kv_heads)},
    rates=("scan_decay",),
    told={"mamba_conv_bias": CONV_BIAS},
    turns=False,
    read_only=True,
)
FALCON_H1 = Architecture(
    "falcon_h1",
    facts={"mamba_norm_before_gate": False},
    fields=SCAN_FIELDS,
    rates=("scan_decay",),
    told={"mamba_conv_bias": CONV_BIAS, "mamba_rms_norm": ".ssm_norm."},
    rewrites=(Rewrite(r"(blk\.\d+\.ffn_norm)", r"\1.weight"),),
    required=("head",),
    read_only=True,
)
"""Its multipliers are in the weights, so that a tied head, which has another one, cannot be told from the table."""
ALONE_FIELDS = {
    "n_groups": "ssm.group_count",
    "conv_kernel": "ssm.conv_kernel",
    "mamba_d_ssm": INNER,
}
"""Fields of a scan of heads, as families call them whose layers are scans alone."""
MAMBA2 = Architecture(
    "mamba2",
    spelling=(("rms_norm_eps", "layer_norm_epsilon"),),
    fields=ALONE_FIELDS | {"num_heads": "ssm.time_step_rank", "state_size": "ssm.state_size", WIDTH: INNER},
    quotient=("num_heads", "head_dim"),
    rates=("scan_decay",),
    told={"use_conv_bias": CONV_BIAS},
    read_only=True,
)
NEMOTRON_H = replace(
    MAMBA2,
    model_type="nemotron_h",
    extra=(NEXTN,),
    kinds=one_part,
    spelling=(
        ("num_experts", "n_routed_experts"),
        ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
        ("layer_norm_eps", "layer_norm_epsilon"),
    ),
    fields=ALONE_FIELDS
    | {
        "mamba_num_heads": "ssm.time_step_rank",
        "ssm_state_size": "ssm.state_size",
        "moe_latent_size": "moe_latent_size",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
    },
    quotient=("mamba_num_heads", "mamba_head_dim"),
    turns=False,
)
STEPS = (Rewrite(r"(blk\.\d+\.ssm_dt\.bias)", r"\1"),)
"""Time steps of channels are made by a matrix, whose bias is no role of its own."""
MAMBA = replace(
    MAMBA2,
    model_type="mamba",
    extra=(NORMED,),
    fields={
        "time_step_rank": "ssm.time_step_rank",
        "state_size": "ssm.state_size",
        "conv_kernel": "ssm.conv_kernel",
        WIDTH: INNER,
    },
    quotient=None,
    rates=("channel_decay",),
    normed="falcon_mamba",
    rewrites=STEPS,
)
JAMBA = replace(
    MAMBA,
    model_type="jamba",
    extra=(INNER,),
    spelling=(),
    normed="",
    defaults={"num_experts": 1},
    kinds=by_periods,
    fields={
        "mamba_dt_rank": "ssm.time_step_rank",
        "mamba_d_state": "ssm.state_size",
        "mamba_d_conv": "ssm.conv_kernel",
    },
    quotient=("hidden_size", "mamba_expand"),
    told={"mamba_conv_bias": CONV_BIAS},
    turns=False,
)
ARCHITECTURES = {
    "llama": Architecture("llama", interleaved=True, extra=WINDOW[:1], windowed="mistral", mixture="mixtral"),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", facts={"norm_topk_prob": True}),
    "gemma": Architecture("gemma"),
    "gemma2": Architecture("gemma2", extra=WINDOW, large=46),
    "gemma3": Architecture("gemma3_text", extra=WINDOW, large=62),
    "phi2": Architecture("phi"),
    "phi3": Architecture("phi3", extra=WINDOW[:1]),
    "glm4moe": Architecture(
        "glm4_moe",
        extra=(NEXTN,),
        names={"mlp_norm": "post_attention_norm"},
        fixed={"expert_gating_func": SIGMOID},
        spelling=(("num_experts", "n_routed_experts"), ("num_dense_layers", "first_k_dense_replace")),
    ),
    "gpt-oss": Architecture("gpt_oss", extra=WINDOW, names={"mlp_norm": "post_attention_norm"}),
    "granitehybrid": GRANITE_HYBRID,
    "falcon-h1": FALCON_H1,
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H,
    "mamba2": MAMBA2,
    "mamba": MAMBA,
    "jamba": JAMBA,
    "qwen3next": QWEN3_NEXT,
    "qwen35": QWEN3_5,
    "qwen35moe": replace(QWEN3_5, model_type="qwen3_5_moe_text"),
    "lfm2": LFM2,
    "lfm2moe": replace(
        LFM2, model_type="lfm2_moe", facts={"use_expert_bias": False}, fixed={"expert_gating_func": SIGMOID}
    ),
}
