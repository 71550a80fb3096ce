"""GGUF's architectures whose layers have mixers of several kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.model.disk.gguf_architecture import Architecture
from quire.model.disk.gguf_layers import by_periods, one_part, without_heads
from quire.model.disk.gguf_names import (
    DELTA_FIELDS,
    INNER,
    MULTIPLIERS,
    NEXTN,
    NORMED,
    RECURRENT,
    WIDTH,
)
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.mixers.delta import TILED
from quire.model.spec import Factors, ModelSpec

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
    fields=SCAN_FIELDS | MULTIPLIERS,
    orders={"q": interleaved_heads(lambda s: s.heads), "k": interleaved_heads(lambda s: s.kv_heads)},
    rates=("scan_decay",),
    told={"mamba_conv_bias": CONV_BIAS},
    turns=False,
    parted={"gate_up": ("gate", "up")},
    shapes=SCAN_SHAPES,
)


def falcon_factors(spec: ModelSpec) -> dict[str, NDArray[np.float32]]:
    """What files have multiplied into matrices: of keys, what all of their products with queries are."""
    scan, own = spec.scan, spec.factors
    rows = np.repeat(scan.factors, (scan.inner, scan.inner, scan.pairs, scan.pairs, scan.heads))
    numbers = {
        "embed": spec.embed_scale,
        "head": spec.logit_scale,
        "k": spec.attention_scale * spec.head_dim**0.5,
        "o": own.attention,
        "scan_out": own.scan,
        "gate": own.mlp_in,
        "down": own.mlp_in * own.mlp_out,
    }
    return {"scan_in": rows.astype(np.float32)} | {role: np.array(x, np.float32) for role, x in numbers.items()}


def without_factors(spec: ModelSpec) -> ModelSpec:
    """The facts of a model whose matrices are multiplied so."""
    scan = replace(spec.scan, factors=(1.0,) * len(spec.scan.factors))
    scales = {"attention_scale": spec.head_dim**-0.5, "embed_scale": 1.0, "logit_scale": 1.0}
    return replace(spec, scan=scan, factors=Factors(), **scales)


FALCON_H1 = Architecture(
    "falcon_h1",
    facts={"mamba_norm_before_gate": False},
    fields=SCAN_FIELDS,
    rates=("scan_decay",),
    told={"mamba_conv_bias": CONV_BIAS, "mamba_rms_norm": ".ssm_norm."},
    naked=("mlp_norm",),
    required=("head",),
    shapes=SCAN_SHAPES,
    factors=falcon_factors,
    stored=without_factors,
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
STREAM_FACTORS = tuple(f"{part}_alpha_factor" for part in ("full_attn", "linear_attn", "mlp"))
"""Fields of what multiplies the normed stream, which are the same in files that have one number for them."""
INTERVAL = "full_attention_interval"


def kinds_of_minimax(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """Which layers attend: every eighth, where no key tells."""
    every = raw.get(INTERVAL) or 8
    kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(raw["num_hidden_layers"])]
    return {"layer_types": raw.get("layer_types") or kinds, **dict.fromkeys(STREAM_FACTORS, raw.get("stream_factor"))}


MINIMAX_01 = Architecture(
    "minimax",
    extra=(RECURRENT,),
    fields={"stream_factor": MULTIPLIERS["residual_multiplier"], INTERVAL: INTERVAL},
    further=kinds_of_minimax,
    tell=lambda raw: {"stream_factor": raw.get(STREAM_FACTORS[0], 1.0)},
    also=("minimax_text_01", "minimax_m1"),
)
HRM = Architecture(
    "hrm_text",
    extra=("hrm.prefix_lm",),
    rewrites=(Rewrite(r"hrm\.z_l_init", "hrm.z_l_init.weight"),),
    naked=("turn_start",),
    fields={
        "num_layers_per_stack": "hrm.layers_per_stack",
        "L_cycles": "hrm.l_cycles",
        "H_cycles": "hrm.h_cycles",
        "embedding_scale": MULTIPLIERS["embedding_multiplier"],
    },
)
"""The layers of the second stack follow those of the first; `block_count` is that of all runs."""
