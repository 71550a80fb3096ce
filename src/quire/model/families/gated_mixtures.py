"""The rows of the table of families whose attention has a gate, and of mixtures whose layers have windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.edges import Edges
from quire.model.families.hybrids import CONV_BIASES, LFM2, LFM2_DEFAULTS, LFM2_READS, LFM2_SPELLING, conv_windows
from quire.model.families.mixtures import CORRECTED, EXPERTS, LOCAL, SHARED, SHARED_EXPERT, shared_width
from quire.model.families.names import BIAS_FLAGS, GEMMA, LLAMA, POST_NORMS, STACKED, without
from quire.model.families.newer_mixtures import BARE, corrections_called
from quire.model.families.readers import alternating, embed_scale, read_moe, window_rope
from quire.model.families.rope import NO_ROPE, Rope, read_rope
from quire.model.families.row import Family, Reader, layer_kinds, sliding_windows, spec_facts
from quire.model.layer_sizes import LayerSizes
from quire.model.spec import MoE


def windows_turn(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """Layers that see everything do not rotate."""
    ropes = spec_facts(config)["rope"]
    kinds = layer_kinds(config, layers)
    return tuple(rope if kind == "sliding_attention" else NO_ROPE for kind, rope in zip(kinds, ropes, strict=True))


def afmoe_experts(config: HfConfig, layers: int) -> MoE:
    """Sigmoid scores, chosen with a correction bias, and a shared expert of `num_shared_experts` times the width."""
    score = config.text("score_func", "sigmoid")
    if score != "sigmoid":
        raise config.fail("score_func", f"{score!r} is not known; known: sigmoid")
    moe = read_moe(score, config.flag("route_norm", True))(config, layers)
    return replace(moe, shared=shared_width(config))


def afmoe_scale(config: HfConfig, layers: int) -> float:
    """The square root of the width where `mup_enabled` is true."""
    return embed_scale(config, layers) if config.flag("mup_enabled", False) else 1.0


AFMOE_WRITTEN = (
    Rewrite(r"(.*\.mlp)\.expert_bias", r"\1.gate_correction.weight", release=r"\1.expert_bias"),
    *STACKED,
)


def kinds_turn(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """A rope for each kind of layer; those that convolve turn nothing."""
    dim, longest = config.integer("head_dim"), config.integer("max_position_embeddings")
    kinds = layer_kinds(config, layers)
    ropes = {kind: read_rope(config, dim, longest, kind) for kind in set(kinds) - {"conv"}}
    return tuple(ropes.get(kind, NO_ROPE) for kind in kinds)


def lfm3_kinds(config: HfConfig) -> list[str]:
    """`layer_types` where config.json has none: of four layers one sees everything, one a window, two convolve."""
    turns = ["sliding_attention", "conv", "full_attention", "conv"]
    kinds = [turns[i % 4] for i in range(config.integer("num_hidden_layers", high=1024))]
    return ["conv", *kinds[1:]]


def lfm3_windows(config: HfConfig, layers: int) -> tuple[int, ...]:
    """Rows that a layer reads of each sequence: a convolution its taps, some attention a window, 0 = all."""
    taps = conv_windows(config, layers)
    return tuple(window or rows for window, rows in zip(sliding_windows(config, layers), taps, strict=True))


LFM3 = LFM2 | {
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "head_gate": "self_attn.gate_proj",
    "attn_post_norm": "post_operator_norm",
    "mlp_post_norm": "post_ffn_norm",
}


LFM3_DEFAULTS = LFM2_DEFAULTS | {
    "num_key_value_heads": 4,
    "head_dim": 128,
    "conv_L_cache": 7,
    "sliding_window": 256,
    "layer_types": lfm3_kinds,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    },
}


def lfm3(config: HfConfig) -> Family:
    """LFM2 with windows, a rope for each kind of layer, a gate for each head, and norms of what is added."""
    norms = POST_NORMS if config.flag("use_sandwich_norm", True) else ()
    gates = ("head_gate",) if config.flag("use_attention_gate", True) else ()
    return Family(
        without(LFM3, *{*POST_NORMS, "head_gate"}.difference(norms, gates)),
        LFM3_DEFAULTS,
        LFM2_READS | {"windows": lfm3_windows, "rope": kinds_turn},
        ("q_norm", "k_norm", *norms, *gates),
        BIAS_FLAGS | CONV_BIASES,
        {"join": "post_norm" if norms else "sequential"},
        LFM2_SPELLING,
        rewrites=(Rewrite(r"(.*\.self_attn)\.g_proj(\..+)", r"\1.gate_proj\2"),),
    )


def cohere2_kinds(config: HfConfig) -> list[str]:
    """`layer_types` where config.json has none: the first layers, which have no experts, count by themselves."""
    dense = config.integer("first_k_dense_replace", 0, low=0)
    every = [
        *([config.integer("prefix_dense_sliding_window_pattern", 1)] * dense),
        *([config.integer("sliding_window_pattern", 4)] * (config.integer("num_hidden_layers", high=1024) - dense)),
    ]
    places = [i if i < dense else i - dense for i in range(len(every))]
    return ["sliding_attention" if (i + 1) % n else "full_attention" for i, n in zip(places, every, strict=True)]


def cohere2_experts(config: HfConfig, layers: int) -> MoE:
    """A softmax over the logits of the chosen, or their sigmoids; what they and the shared expert make is averaged."""
    score, together = (
        config.text("expert_selection_fn", "softmax"),
        config.text("shared_expert_combination_strategy", "average"),
    )
    if score not in ("softmax", "sigmoid"):
        raise config.fail("expert_selection_fn", f"{score!r} is not known; known: softmax, sigmoid")
    if together not in ("average", "sum"):
        raise config.fail("shared_expert_combination_strategy", f"{together!r} is not known; known: average, sum")
    moe = read_moe(score, score == "softmax" or config.flag("norm_topk_prob", True))(config, layers)
    shared = config.integer("num_shared_experts", 0, low=0, high=1024) * moe.intermediate
    share = 0.5 if shared and together == "average" else 1.0
    return replace(moe, routing=replace(moe.routing, scale=share), shared=shared, shared_scale=share)


def cohere2_rope(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """Layers without experts rotate, too, where `prefix_dense_sliding_window_pattern` is 1."""
    sparse, every = cohere2_experts(config, layers).sparse, spec_facts(config)["rope"]
    forced = config.integer("prefix_dense_sliding_window_pattern", 1) == 1
    ropes = zip(windows_turn(config, layers), every, sparse, strict=True)
    return tuple(rope if has or not forced else own for rope, own, has in ropes)


def cohere2_width(config: HfConfig, layers: int) -> int:
    """The width of MLPs of layers without experts."""
    return config.integer("prefix_dense_intermediate_size", config.integer("intermediate_size"), high=1 << 24)


def cohere2_moe(config: HfConfig) -> Family:
    """Cohere 2 with experts; where config.json has `rms_norm_eps`, norms are not centered."""
    rms = config.has("rms_norm_eps")
    return Family(
        without(LLAMA, "mlp_norm", "q_norm", "k_norm") | EXPERTS | SHARED,
        {"tie_word_embeddings": True, "head_dim": 128, "logit_scale": 0.0625, "max_position_embeddings": 8192,
         "sliding_window": 4096, "layer_types": cohere2_kinds, "num_experts": 8, "num_experts_per_tok": 2,
         "moe_intermediate_size": lambda c: c.integer("intermediate_size", high=1 << 24),
         **({} if rms else {"layer_norm_eps": 1e-5})},
        {"logit_scale": lambda c, layers: c.number("logit_scale"), "windows": sliding_windows, "rope": cohere2_rope,
         "moe": cohere2_experts, "intermediate": cohere2_width},
        flags=BIAS_FLAGS, rewrites=STACKED, spelling=() if rms else (("rms_norm_eps", "layer_norm_eps"),),
        facts={"norm": "rms" if rms else "layer", "join": "parallel", "interleaved_rope": True},
    )  # fmt: skip


def laguna_sizes(config: HfConfig, layers: int) -> tuple[LayerSizes, ...]:
    """Heads of each layer by `num_attention_heads_per_layer`; without it all layers have as many."""
    spec = spec_facts(config)
    heads = config.integers("num_attention_heads_per_layer") or (spec["heads"],) * layers
    kv_heads = spec["kv_heads"]
    if len(heads) != layers or any(count < 1 or count % kv_heads for count in heads):
        raise config.fail(
            "num_attention_heads_per_layer", f"needs {layers} multiples of num_key_value_heads {kv_heads}"
        )
    return tuple(LayerSizes(count, kv_heads, spec["head_dim"], spec["intermediate"]) for count in heads)


def laguna_experts(config: HfConfig, layers: int) -> MoE:
    """Sigmoid scores of logits that may be capped, chosen with a correction bias."""
    if config.flag("moe_apply_router_weight_on_input", False):
        raise config.fail("moe_apply_router_weight_on_input", "true is not supported")
    cap = config.number("moe_router_logit_softcapping", 0.0, low=-1)
    return replace(read_moe("sigmoid", True)(config, layers), router_cap=max(cap, 0.0))


def laguna_gate(config: HfConfig) -> str:
    """The role of the matrix that gates: of a head, or of each of its numbers."""
    gating = config.raw.get("gating", True)
    if gating not in (True, False, None, "per-head", "per-element"):
        raise config.fail("gating", f"{gating!r} is not known; known: per-head, per-element")
    return "head_gate" if gating in (True, "per-head") else "attn_gate"


LAGUNA_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def laguna(config: HfConfig) -> Family:
    """A softplus for each head, or for each number, multiplies what attention gives; layers differ in their heads."""
    gate = laguna_gate(config)
    return Family(
        LLAMA | EXPERTS | without(SHARED_EXPERT, "shared_switch") | CORRECTED | {gate: "self_attn.g_proj"},
        {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 512,
         "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
         "shared_expert_intermediate_size": 512, "first_k_dense_replace": 1, "rope_parameters": LAGUNA_ROPES},
        {"windows": laguna_windows, "rope": kinds_turn, "sizes": laguna_sizes, "moe": laguna_experts},
        ("q_norm", "k_norm", gate, "router_bias"),
        BIAS_FLAGS, {"gate": "softplus"},
        (("routed_scaling_factor", "moe_routed_scaling_factor"),), rewrites=LAGUNA_WRITTEN,
    )  # fmt: skip


def laguna_windows(config: HfConfig, layers: int) -> tuple[int, ...]:
    """Windows of layers that `layer_types` names; without it all see everything."""
    return sliding_windows(config, layers) if config.has("layer_types") else (0,) * layers


LAGUNA_WRITTEN = (
    Rewrite(
        r"(.*\.mlp)\.(?:experts|gate)\.e_score_correction_bias",
        r"\1.gate_correction.weight",
        release=r"\1.experts.e_score_correction_bias",
    ),
    Rewrite(r"(.*\.mlp)\.shared_experts\.(.+)", r"\1.shared_expert.\2"),
    *STACKED,
)


def backward_fourths(config: HfConfig) -> list[str]:
    """`layer_types` where config.json has none: the last and every fourth before it see everything."""
    last = config.integer("num_hidden_layers", high=1024) - 1
    return ["sliding_attention" if (last - i) % 4 else "full_attention" for i in range(last + 1)]


def muse_ropes(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """One rope, but for layers that have 0 in `layer_rope_theta`; without it, for the last and every fourth before."""
    ropes, thetas = spec_facts(config)["rope"], config.raw.get("layer_rope_theta")
    turns = [(layers - 1 - i) % 4 != 0 for i in range(layers)] if thetas is None else thetas
    known = isinstance(turns, list) and len(turns) == layers and all(isinstance(t, int | float) for t in turns)
    if not known or len({t for t in turns if t}) > 1:
        raise config.fail("layer_rope_theta", f"needs {layers} numbers, each 0 or that of rope_parameters")
    return tuple(rope if turn else NO_ROPE for turn, rope in zip(turns, ropes, strict=True))


def muse_scale(config: HfConfig, layers: int) -> float:
    """1 / sqrt(head size), times what multiplies normed queries."""
    return config.number("qk_scale_factor", 3.87) * float(config.integer("head_dim") ** -0.5)


MUSE_READS: dict[str, Reader] = {
    "windows": sliding_windows,
    "rope": muse_ropes,
    "attention_scale": muse_scale,
    "unit_norms": lambda c, layers: () if c.flag("weighted_qk_norm", False) else (True,) * layers,
    "post_norm_eps": lambda c, layers: c.number("post_norm_eps", 1e-8, high=1.0),
    "logit_scale": lambda c, layers: c.number("output_multiplier", 26**-0.5),
    "output_softcap": lambda c, layers: c.number("final_logit_softcapping", 20.0),
}


KOLIBRI_WRITTEN = (
    Rewrite(r"(.*\.)post_self_attn_layernorm\.weight", r"\1post_attn_norm.weight"),
    Rewrite(r"(.*\.)post_mlp_layernorm\.weight", r"\1post_ffn_norm.weight"),
    corrections_called("moe.router.expert_bias"),
    *STACKED,
)
"""Names of modules, seen as those of the release."""


GATED_MIXTURES: dict[str, Family | Callable[[HfConfig], Family]] = {
    "afmoe": Family(
        GEMMA | EXPERTS | SHARED | CORRECTED | {"mlp_norm": "pre_mlp_layernorm", "mlp_post_norm": "post_mlp_layernorm",
                                                "attn_gate": "self_attn.gate_proj", "router": "mlp.router.gate"},
        {"head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 16384, "sliding_window": 1024,
         "layer_types": alternating(4), "num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
         "n_shared_experts": 2, "first_k_dense_replace": 1},
        {"windows": sliding_windows, "rope": windows_turn, "embed_scale": afmoe_scale, "moe": afmoe_experts},
        (*POST_NORMS, "q_norm", "k_norm", "attn_gate", "router_bias"),
        BIAS_FLAGS,
        {"join": "post_norm"},
        (("n_shared_experts", "num_shared_experts"), ("first_k_dense_replace", "num_dense_layers"),
         ("routed_scaling_factor", "route_scale"), ("sliding_window_pattern", "global_attn_every_n_layers")),
        rewrites=AFMOE_WRITTEN,
    ),
    "laguna": laguna,
    "muse_glimmer_text": Family(
        GEMMA | {"attn_gate": "self_attn.gate_proj"},
        {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
         "sliding_window": 2048, "layer_types": backward_fourths},
        MUSE_READS,
        (*POST_NORMS, "attn_gate"),
        BIAS_FLAGS,
        {"norm": "rms1p", "join": "post_norm", "edges": Edges(normed=True, plain=True)},
        (("hidden_act", "hidden_activation"),),
    ),
    "kolibri1": Family(
        BARE | EXPERTS | SHARED | CORRECTED | {"attn_post_norm": "post_attn_norm", "mlp_post_norm": "post_ffn_norm"},
        {"head_dim": 128, "num_key_value_heads": 4, "max_position_embeddings": 262144, "sliding_window": 513,
         "layer_types": alternating(5), "num_experts": 384, "num_experts_per_tok": 6, "moe_intermediate_size": 512,
         "shared_expert_intermediate_size": 512},
        {"windows": sliding_windows, "rope": window_rope, "moe": read_moe("late_sigmoid")},
        (*POST_NORMS, "q_norm", "k_norm", "router_bias"),
        facts={"join": "post_norm"},
        spelling=LOCAL,
        rewrites=KOLIBRI_WRITTEN,
    ),
    "lfm3": lfm3,
    "cohere2_moe": cohere2_moe,
}  # fmt: skip
