"""The row of Kimi Linear: the delta rule with a decay for each channel, and latent attention that turns nothing.

Kimi Team 2025, "Kimi Linear: an expressive, efficient attention architecture".
"""

from __future__ import annotations

from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.delta_sizes import DeltaSizes
from quire.model.families.hybrids import DELTA_READS
from quire.model.families.mixtures import CORRECTED, LATENTS, SMALL_QUERIES, grouped_moe
from quire.model.families.names import LLAMA, MIXTRAL_WRITTEN, without
from quire.model.families.readers import LATENT_READS
from quire.model.families.rope import Rope, Still
from quire.model.families.row import Family
from quire.model.spec import MoE
from quire.ops.convolution import MOST_TAPS

NAMES = without(LLAMA, "k", "v", "q_norm", "k_norm") | LATENTS | {
    "delta_q": "self_attn.q_proj",
    "delta_k": "self_attn.k_proj",
    "delta_v": "self_attn.v_proj",
    "delta_conv_q": "self_attn.q_conv1d",
    "delta_conv_k": "self_attn.k_conv1d",
    "delta_conv_v": "self_attn.v_conv1d",
    "delta_decay": "self_attn.A_log",
    "delta_bias": "self_attn.dt_bias",
    "delta_b": "self_attn.b_proj",
    "delta_a_down": "self_attn.f_a_proj",
    "delta_a_up": "self_attn.f_b_proj",
    "delta_z_down": "self_attn.g_a_proj",
    "delta_z_up": "self_attn.g_b_proj",
    "delta_scale": "self_attn.o_norm",
    "delta_out": "self_attn.o_proj",
    "router": "block_sparse_moe.gate",
    "router_bias": CORRECTED["router_bias"].replace("mlp", "block_sparse_moe"),
    "expert_gate": "block_sparse_moe.experts.{}.w1",
    "expert_up": "block_sparse_moe.experts.{}.w3",
    "expert_down": "block_sparse_moe.experts.{}.w2",
    "shared_gate": "block_sparse_moe.shared_experts.gate_proj",
    "shared_up": "block_sparse_moe.shared_experts.up_proj",
    "shared_down": "block_sparse_moe.shared_experts.down_proj",
}  # fmt: skip
WRITTEN = (
    *(
        Rewrite(rf"(.*\.self_attn)\.(?:forget_gate\.)?{vector}", rf"\1.{vector}.weight", release=rf"\1.{vector}")
        for vector in ("A_log", "dt_bias")
    ),
    Rewrite(
        r"(.*\.)(?:mlp|block_sparse_moe)\.gate\.e_score_correction_bias",
        r"\1block_sparse_moe.gate_correction.weight",
        release=r"\1block_sparse_moe.gate.e_score_correction_bias",
    ),
    Rewrite(r"(.*\.)block_sparse_moe\.((?:gate|up|down)_proj\..+)", r"\1mlp.\2"),
    Rewrite(r"(.*\.)mlp\.(shared_experts\..+)", r"\1block_sparse_moe.\2"),
    Rewrite(r"(.*\.self_attn)\.forget_gate\.(.+)", r"\1.\2"),
    Rewrite(r"(.*\.self_attn)\.conv1d\.weight", r"\1.{}_conv1d.weight", parts=("q", "k", "v")),
    *MIXTRAL_WRITTEN,
)
"""Vectors whose names end with what they are, and the names that transformers writes: those of its modules, and of
dense MLPs as of experts."""
FIELD = "linear_attn_config"
SPELLING = (
    ("max_position_embeddings", "model_max_length"),
    ("num_experts_per_tok", "num_experts_per_token"),
    ("n_shared_experts", "num_shared_experts"),
    ("n_group", "num_expert_group"),
    ("norm_topk_prob", "moe_renormalize"),
)
DEFAULTS = {
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "model_max_length": 1048576,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "q_lora_rank": None,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 1024,
    "moe_renormalize": True,
    "routed_scaling_factor": 2.446,
}


def head_dim(config: HfConfig) -> int:
    """Numbers of a head of the delta rule."""
    return config.child(FIELD).integer("head_dim", 128, high=4096)


def heads(config: HfConfig) -> int:
    """Heads of the delta rule."""
    return config.child(FIELD).integer("num_heads", 32, high=4096)


def taps(config: HfConfig) -> int:
    """Rows that its convolutions read."""
    return config.child(FIELD).integer("short_conv_kernel_size", 4, low=2, high=MOST_TAPS)


def kinds(config: HfConfig) -> list[str]:
    """Kinds of layers, whose lists count from 1; without lists every fourth layer behind the first attends."""
    layers, given = config.integer("num_hidden_layers", high=1024), config.child(FIELD)
    attend, recur = (set(given.integers(name)) for name in ("full_attn_layers", "kda_layers"))
    if not attend and not recur:
        return ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(layers)]
    if attend & recur or attend | recur != set(range(1, layers + 1)):
        raise given.fail("full_attn_layers", f"and kda_layers do not name each of {layers} layers once")
    return ["full_attention" if i + 1 in attend else "linear_attention" for i in range(layers)]


def dense_layers(config: HfConfig) -> int:
    """Layers before the first with experts, by `mlp_layer_types` where the file has such a list."""
    found = config.texts("mlp_layer_types")
    if not found:
        return 1
    first = found.index("sparse") if "sparse" in found else len(found)
    if set(found[first:]) - {"sparse"} or set(found[:first]) - {"dense"}:
        raise config.fail("mlp_layer_types", "needs dense layers, then sparse ones")
    return first


def sizes(config: HfConfig, layers: int) -> DeltaSizes:
    """Sizes of the delta rule; the smaller space is as wide as a head."""
    count, width = config.integer("linear_num_heads", high=4096), config.integer("linear_head_dim", high=4096)
    rows = config.integer("linear_conv_kernel_dim", low=2, high=MOST_TAPS)
    return DeltaSizes(count, count, width, width, rows, width, by_channel=True, apart=True, gate="sigmoid")


def still(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """The part of a key that others turn stays as it is."""
    if not config.flag("mla_use_nope", True):
        raise config.fail("mla_use_nope", "false is not supported: only attention without positions is")
    return (Rope(1.0, config.integer("qk_rope_head_dim", high=1 << 12), Still()),) * layers


def experts(config: HfConfig, layers: int) -> MoE:
    """Sigmoid scores, chosen with a correction bias; a group counts by its best two."""
    score = config.text("moe_router_activation_func", "sigmoid")
    if score != "sigmoid" or config.integer("moe_layer_freq", 1) != 1:
        raise config.fail("moe_router_activation_func", f"{score!r}, and moe_layer_freq: only sigmoid and 1 are known")
    return grouped_moe(config, layers, "sigmoid", config.flag("norm_topk_prob", True), 2, limited=True)


def kimi_linear(config: HfConfig) -> Family:
    """Queries of latent attention by way of a smaller space where `q_lora_rank` is not null."""
    straight = not config.has("q_lora_rank")
    return Family(
        without(NAMES, *SMALL_QUERIES) if straight else without(NAMES, "q"),
        DEFAULTS | {"head_dim": lambda c: c.integer("qk_rope_head_dim"), "linear_head_dim": head_dim,
                    "linear_key_head_dim": lambda c: c.integer("linear_head_dim"), "linear_num_heads": heads,
                    "linear_conv_kernel_dim": taps, "layer_types": kinds, "first_k_dense_replace": dense_layers},
        LATENT_READS | DELTA_READS | {"rope": still, "delta": sizes, "moe": experts},
        ("kv_a", "kv_a_norm", "kv_b", "router_bias", *(() if straight else SMALL_QUERIES)),
        spelling=SPELLING,
        rewrites=WRITTEN,
    )  # fmt: skip
