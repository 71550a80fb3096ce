"""How each of GGUF's architectures is read.
See docs/design/weight-formats.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.model.disk.gguf_layers import Kinds, by_periods, one_part, without_heads
from quire.model.disk.gguf_names import (
    DELTA_FIELDS,
    GATING,
    INNER,
    LATENT_LENGTHS,
    LOG_MULTIPLIER,
    NAMES,
    NEXTN,
    NORMED,
    READ_BELOW,
    RECURRENT,
    REWRITES,
    WIDTH,
    WINDOW,
)
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.mixers.delta import TILED
from quire.model.spec import ModelSpec


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

    `parted`: fused matrices of folders -> what is in their place, beside those of `PARTED`. `naked`: further roles
    whose one tensor has the name of the role alone. `shapes`: of vectors that files have as matrices. `sparse`: the
    name is that of models with experts, or of those without; None: of all. `latent`: attention reads latents. `scored`:
    rows by the function by which experts are scored.

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
    parted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    naked: tuple[str, ...] = ()
    shapes: Mapping[str, Callable[[ModelSpec], tuple[int, ...]]] = field(default_factory=dict)
    sparse: bool | None = None
    latent: bool = False
    scored: Mapping[int, str] = field(default_factory=dict)

    def writes(self, spec: ModelSpec) -> bool:
        """Whether a model is written as such a file."""
        kind = self.sparse in (None, any(spec.moe.sparse))
        return spec.family in self.rows and kind and not self.read_only

    @property
    def seen(self) -> tuple[Rewrite, ...]:
        """How tensors are seen that are called otherwise than roles."""
        alone = (Rewrite(rf"(blk\.\d+\.{NAMES[role]})", r"\1.weight") for role in self.naked)
        return *self.rewrites, *alone, *REWRITES

    @property
    def rows(self) -> tuple[str, ...]:
        """Rows of the families table that its files may have."""
        own = (self.model_type, self.windowed, self.mixture, self.normed, *self.scored.values())
        return tuple(dict.fromkeys(row for row in own if row))

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
SOFTMAX, SIGMOID = 1, 2
"""Of the format's functions by which experts are scored."""
DEEPSEEK2 = Architecture(
    "deepseek_v2",
    extra=(*LATENT_LENGTHS, LOG_MULTIPLIER, GATING, NEXTN),
    spelling=(("num_experts", "n_routed_experts"), ("num_dense_layers", "first_k_dense_replace")),
    fields={
        "q_lora_rank": "attention.q_lora_rank",
        "kv_lora_rank": "attention.kv_lora_rank",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
    },
    read_only=True,
    latent=True,
    scored={SOFTMAX: "deepseek_v2", SIGMOID: "deepseek_v3"},
)
"""Files without the function are those of DeepSeek-V2, which are older."""
KIMI_LINEAR = Architecture(
    "kimi_linear",
    extra=LATENT_LENGTHS,
    names={"delta_out": "attn_output"},
    facts={"norm_topk_prob": True},
    fixed={GATING: SIGMOID},
    kinds=without_heads("linear_attention"),
    spelling=(
        ("num_dense_layers", "first_k_dense_replace"),
        ("num_attention_heads", "linear_num_heads"),
        ("max_position_embeddings", "model_max_length"),
        ("num_experts_per_tok", "num_experts_per_token"),
        ("n_shared_experts", "num_shared_experts"),
        ("norm_topk_prob", "moe_renormalize"),
    ),
    fields={
        "q_lora_rank": "attention.q_lora_rank",
        "kv_lora_rank": "attention.kv_lora_rank",
        "linear_head_dim": "kda.head_dim",
        "linear_conv_kernel_dim": "ssm.conv_kernel",
    },
    rates=("delta_decay",),
    read_only=True,
    latent=True,
)


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
SCAN_SHAPES: Mapping[str, Callable[[ModelSpec], tuple[int, ...]]] = {
    "scan_decay": lambda spec: (spec.scan.heads, 1),
    "scan_skip": lambda spec: (spec.scan.heads, 1),
    "scan_scale": lambda spec: (spec.scan.groups, spec.scan.inner // spec.scan.groups),
}
"""A row for each head, or for each group."""
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
    parted={"gate_up": ("gate", "up")},
    shapes=SCAN_SHAPES,
)
FALCON_H1 = Architecture(
    "falcon_h1",
    facts={"mamba_norm_before_gate": False},
    fields=SCAN_FIELDS,
    rates=("scan_decay",),
    told={"mamba_conv_bias": CONV_BIAS, "mamba_rms_norm": ".ssm_norm."},
    naked=("mlp_norm",),
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
    shapes=SCAN_SHAPES,
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
        fixed={GATING: SIGMOID},
        spelling=(("num_experts", "n_routed_experts"), ("num_dense_layers", "first_k_dense_replace")),
    ),
    "deepseek2": DEEPSEEK2,
    "kimi-linear": KIMI_LINEAR,
    "gpt-oss": Architecture("gpt_oss", extra=WINDOW, names={"mlp_norm": "post_attention_norm"}),
    "granitehybrid": GRANITE_HYBRID,
    "falcon-h1": FALCON_H1,
    "nemotron_h": replace(NEMOTRON_H, sparse=False),
    "nemotron_h_moe": replace(NEMOTRON_H, sparse=True),
    "mamba2": MAMBA2,
    "mamba": MAMBA,
    "jamba": JAMBA,
    "qwen3next": QWEN3_NEXT,
    "qwen35": QWEN3_5,
    "qwen35moe": replace(QWEN3_5, model_type="qwen3_5_moe_text"),
    "lfm2": LFM2,
    "lfm2moe": replace(LFM2, model_type="lfm2_moe", facts={"use_expert_bias": False}, fixed={GATING: SIGMOID}),
}
