"""Further rows of families with experts: attention of other rows beside routers and experts of other rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.mixtures import (
    CORRECTED,
    EXPERTS,
    LOCAL,
    MIXTRAL,
    ROUTED,
    SHARED,
    SHARED_EXPERT,
    deepseek_v3,
    layers_ahead,
    sigmoid_experts,
)
from quire.model.families.names import (
    ALL_MLP_BIAS,
    BIAS_FLAGS,
    CORRECTION,
    FINAL_NEXTN,
    LLAMA,
    MIXTRAL_WRITTEN,
    OLMO2,
    OWN_MTP,
    POST_NORMS,
    STACKED,
    without,
)
from quire.model.families.readers import (
    exaone4_kinds,
    layer_thetas,
    read_moe,
    sparse_layers,
    turned_share,
    window_rope,
)
from quire.model.families.rope import NO_ROPE, Rope, read_rope
from quire.model.families.row import Family, layer_kinds, sliding_windows
from quire.model.families.state_space import GRANITE_EXPERTS, GRANITE_STACKED
from quire.model.families.variants import granite_facts

ROW_NORMS = ("q_row_norm", "k_row_norm")
ROWS_NORMED = {"q_row_norm": "self_attn.q_norm", "k_row_norm": "self_attn.k_norm"}
BARE = without(LLAMA, "gate", "up", "down")
"""Names of a layer that has experts for an MLP."""


def sinks_called(name: str) -> Rewrite:
    """The vector of sinks, which files call `name` and modules `sinks`, seen as a weight of the latter name."""
    return Rewrite(rf"(.*\.self_attn)\.(?:{name}|sinks)", r"\1.sinks.weight", release=rf"\1.{name}")


def corrections_called(name: str, to: str = "mlp") -> Rewrite:
    """The correction bias, which files keep as `name` of a layer, seen as a weight under the name of a role."""
    written = r"(?:mlp|block_sparse_moe)\.(?:gate\.)?e_score_correction_bias"
    pattern = rf"(.*\.)(?:{name.replace('.', chr(92) + '.')}|{written})"
    return Rewrite(pattern, rf"\1{to}.gate_correction.weight", release=rf"\1{name}")


def granite_moe(config: HfConfig) -> Family:
    """Granite with experts, beside a shared one where `shared_intermediate_size` is not 0."""
    shared = config.integer("shared_intermediate_size", 0, low=0, high=1 << 24) > 0
    names = without(LLAMA, "gate", "up", "down", "q_norm", "k_norm") | GRANITE_EXPERTS
    return Family(
        names if shared else without(names, "shared_gate_up", "shared_down"),
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        {"moe": read_moe(renormalize=True)},
        flags={"attention_bias": BIAS_FLAGS["attention_bias"]},
        facts=granite_facts(config),
        spelling=(*LOCAL, ("shared_expert_intermediate_size", "shared_intermediate_size")),
        rewrites=GRANITE_STACKED,
    )


def fourths(config: HfConfig) -> list[str]:
    """`layer_types` where config.json has none: every fourth layer from the first on sees everything."""
    layers = config.integer("num_hidden_layers", high=1024)
    return ["sliding_attention" if i % 4 else "full_attention" for i in range(layers)]


def granite_moe_windows(config: HfConfig) -> Family:
    """Windows, sinks, and a rope for each layer."""
    family = granite_moe(config)
    return replace(
        family,
        names={**family.names, "sinks": "self_attn.sinks"},
        defaults={**family.defaults, "sliding_window": 128, "layer_types": fourths},
        read={**family.read, "windows": sliding_windows, "rope": layer_thetas},
        required=("sinks",),
        rewrites=(sinks_called("sinks"), *family.rewrites),
    )


def sliding_rope(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """Layers with a window turn, those that see everything do not."""
    rope = read_rope(config, config.integer("head_dim"), config.integer("max_position_embeddings"), "sliding_attention")
    return tuple(rope if kind == "sliding_attention" else NO_ROPE for kind in layer_kinds(config, layers))


def flint_kinds(config: HfConfig) -> list[str]:
    """`layer_types` where config.json has none: the first two, every fourth and the last layer see everything."""
    last = config.integer("num_hidden_layers", high=1024) - 1
    wide = [i < 2 or i % 4 == 1 or i == last for i in range(last + 1)]
    return ["full_attention" if full else "sliding_attention" for full in wide]


def axk1(config: HfConfig) -> Family:
    """DeepSeek-V3 with a norm of what experts add; files have it in dense layers too, where nothing reads it."""
    own = {"n_routed_experts": 192, "max_position_embeddings": 32768, "first_k_dense_replace": 1}
    base, norm, layers = deepseek_v3(config), "mlp_post_norm", config.integer("num_hidden_layers", high=1024)
    family = replace(base, defaults={**base.defaults, **own})
    dense = [i for i, sparse in enumerate(sparse_layers(family.fill_in(config), layers)) if not sparse]
    return replace(
        family, mtp=None,
        names={**family.names, norm: "post_mlp_layernorm"},
        required=(*(part for part in family.required if part != "router_bias"), norm),
        facts={"join": "post_norm", "bare": tuple((norm, i) for i in dense)},
        rewrites=(Rewrite(r"(.*\.)mlp\.(post_mlp_layernorm\.weight)", r"\1\2"), *family.rewrites),
        skipped=(*family.skipped, *(f"model.layers.{i}.post_mlp_layernorm." for i in dense)),
    )  # fmt: skip


HY_WRITTEN = (
    corrections_called("mlp.expert_bias"),
    Rewrite(r"(.*\.mlp)\.gate\.weight", r"\1.router.gate.weight"),
    Rewrite(r"(.*\.mlp)\.shared_experts\.(.+)", r"\1.shared_mlp.\2"),
)
"""Names of modules, seen as those of the release."""
HY = LLAMA | EXPERTS | CORRECTED | {role: name.replace("experts", "mlp") for role, name in SHARED.items()} | {
    "router": "mlp.router.gate",
}  # fmt: skip


HY_SPELLING = (("n_shared_experts", "num_shared_experts"), ("routed_scaling_factor", "router_scaling_factor"))


def hy_v3(config: HfConfig) -> Family:
    """Norms of heads, sigmoid scores chosen with a correction bias, shared experts."""
    return Family(
        HY,
        {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 11158840.0,
         "max_position_embeddings": 131072, "num_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1,
         "moe_intermediate_size": 1536, "router_scaling_factor": 2.826, "first_k_dense_replace": 1},
        {"moe": sigmoid_experts(True)},
        ("q_norm", "k_norm", "router_bias"),
        {"attention_bias": BIAS_FLAGS["attention_bias"], "mlp_bias": ALL_MLP_BIAS},
        spelling=(*LOCAL, *HY_SPELLING),
        rewrites=(*HY_WRITTEN, *STACKED), skipped=layers_ahead(config), mtp=FINAL_NEXTN,
    )  # fmt: skip


NEWER_MIXTURES: Mapping[str, Family | Callable[[HfConfig], Family]] = {
    "granitemoe": granite_moe,
    "granitemoeshared": granite_moe,
    "granitemoe_swa": granite_moe_windows,
    "exaone_moe": Family(
        LLAMA | EXPERTS | SHARED | CORRECTED,
        {"rms_norm_eps": 1e-5, "sliding_window": 4096, "layer_types": exaone4_kinds, "num_experts": 64,
         "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024, "first_k_dense_replace": 1,
         "routed_scaling_factor": 2.5},
        {"windows": sliding_windows, "rope": window_rope, "moe": sigmoid_experts(True)},
        ("q_norm", "k_norm", "router_bias"),
        spelling=(("n_shared_experts", "num_shared_experts"),),
        rewrites=(corrections_called("mlp.e_score_correction_bias"), *STACKED),
        skipped=("mtp.",),
        mtp=replace(OWN_MTP, windowed=False),
    ),
    "solar_open": Family(
        BARE | EXPERTS | SHARED | CORRECTED,
        {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
         "max_position_embeddings": 131072, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
         "moe_intermediate_size": 1280,
         "intermediate_size": lambda c: c.integer("moe_intermediate_size", high=1 << 24)},
        {"moe": sigmoid_experts(True)},
        ("router_bias",),
        {"attention_bias": ("q.bias", "k.bias", "v.bias")},
        spelling=ROUTED,
        rewrites=(CORRECTION, *STACKED),
    ),
    "flex_olmo": Family(
        without(OLMO2, "gate", "up", "down") | EXPERTS,
        {"rope_theta": 5e5, "max_position_embeddings": 4096, "num_experts": 7, "num_experts_per_tok": 5},
        {"moe": read_moe()},
        (*ROW_NORMS, *POST_NORMS),
        {"attention_bias": BIAS_FLAGS["attention_bias"]},
        {"join": "post_norm"},
        spelling=LOCAL,
        rewrites=STACKED,
    ),
    "minimax_m2": Family(
        MIXTRAL | ROWS_NORMED | {"router_bias": "block_sparse_moe.gate_correction"},
        {"head_dim": 128, "num_key_value_heads": 8, "rope_theta": 5e6, "max_position_embeddings": 196608,
         "num_local_experts": 256, "num_experts_per_tok": 8, "partial_rotary_factor": turned_share("head_dim")},
        {"moe": read_moe("sigmoid", True)},
        (*ROW_NORMS, "router_bias"),
        spelling=LOCAL,
        rewrites=(corrections_called("block_sparse_moe.e_score_correction_bias", "block_sparse_moe"), *MIXTRAL_WRITTEN),
    ),
    "hy_v3": hy_v3,
    "mellum": Family(
        LLAMA | EXPERTS,
        {"head_dim": 128, "num_key_value_heads": 4, "sliding_window": 1024, "max_position_embeddings": 131072,
         "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 896, "norm_topk_prob": True},
        {"windows": sliding_windows, "moe": read_moe()},
        ("q_norm", "k_norm"),
        BIAS_FLAGS,
        spelling=LOCAL,
        rewrites=STACKED,
        skipped=("mtp.",),
    ),
    "axk1": axk1,
    "kimi_k2": deepseek_v3,
    "flint": Family(
        LLAMA | EXPERTS | without(SHARED_EXPERT, "shared_switch") | {"sinks": "self_attn.sinks"},
        {"head_dim": 128, "num_key_value_heads": 4, "max_position_embeddings": 262144, "sliding_window": 513,
         "layer_types": flint_kinds, "mlp_only_layers": lambda c: list(range(min(2, c.integer("num_hidden_layers")))),
         "num_experts": 256, "num_experts_per_tok": 6, "moe_intermediate_size": 512,
         "shared_expert_intermediate_size": 1024, "norm_topk_prob": True},
        {"windows": sliding_windows, "rope": sliding_rope, "moe": read_moe("sigmoid")},
        ("q_norm", "k_norm", "sinks"),
        {"attention_bias": BIAS_FLAGS["attention_bias"]},
        spelling=LOCAL,
        rewrites=(sinks_called("softmax_offset"), *STACKED),
    ),
}  # fmt: skip
