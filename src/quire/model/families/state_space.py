"""The rows of the table of families with selective scans (Mamba-2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.mixtures import LOCAL, sigmoid_experts
from quire.model.families.names import GATE_UP, LLAMA, MLP_BIAS, QKV_BIAS, MtpNames, naked, without
from quire.model.families.readers import endless, no_rope, read_moe
from quire.model.families.rope import Rope, read_rope
from quire.model.families.row import EARLIER, Family, Reader, layer_kinds
from quire.model.families.variants import granite_facts
from quire.model.spec import ATTENTION, MLP, SCAN, MoE, ScanSizes
from quire.ops.convolution import MOST_TAPS

MAMBA = {
    "scan_in": "mamba.in_proj",
    "scan_conv": "mamba.conv1d",
    "scan_decay": "mamba.A_log",
    "scan_skip": "mamba.D",
    "scan_bias": "mamba.dt_bias",
    "scan_scale": "mamba.norm",
    "scan_out": "mamba.out_proj",
}
NAKED = naked(["mamba", "mixer"], ["A_log", "dt_bias", "D"])
BACKBONE = {
    "embed": "backbone.embeddings",
    "final_norm": "backbone.norm_f",
    "head": "lm_head",
    "layer": "backbone.layers.{}.",
    "attn_norm": "norm",
}
MIXER = {role: name.replace("mamba.", "mixer.") for role, name in MAMBA.items()}
NEMOTRON = BACKBONE | MIXER | {
    "q": "mixer.q_proj",
    "k": "mixer.k_proj",
    "v": "mixer.v_proj",
    "o": "mixer.o_proj",
    "up": "mixer.up_proj",
    "down": "mixer.down_proj",
}  # fmt: skip
NEMOTRON_EXPERTS = {
    "router": "mixer.gate",
    "router_bias": "mixer.gate_correction",
    "expert_up": "mixer.experts.{}.up_proj",
    "expert_down": "mixer.experts.{}.down_proj",
    "shared_up": "mixer.shared_experts.up_proj",
    "shared_down": "mixer.shared_experts.down_proj",
}
ALONE = ("attn_norm", "q", "k", "v", "o")
"""Roles of a layer that attends."""
LATENT_EXPERTS = {"expert_enter": "mixer.fc1_latent_proj", "expert_leave": "mixer.fc2_latent_proj"}
NEMOTRON_WRITTEN = (
    Rewrite(
        r"(.*\.mixer)\.gate\.e_score_correction_bias",
        r"\1.gate_correction.weight",
        release=r"\1.gate.e_score_correction_bias",
    ),
    Rewrite(r"(.*\.mixer\.experts)\.(up|down)_proj", r"\1.{}.\2_proj.weight", True),
)
SCAN_BIASES = {
    "mamba_conv_bias": ("scan_conv.bias",),
    "mamba_proj_bias": ("scan_in.bias", "scan_out.bias"),
}
SCAN_DEFAULTS: dict[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
HYBRID = without(LLAMA, "q_norm", "k_norm") | MAMBA
FEED_FORWARD = {
    "final_norm": "model.final_layernorm",
    "mlp_norm": "pre_ff_layernorm",
    "gate": "feed_forward.gate_proj",
    "up": "feed_forward.up_proj",
    "down": "feed_forward.down_proj",
}
GRANITE_EXPERTS = {
    "router": "block_sparse_moe.router.layer",
    "expert_gate": "block_sparse_moe.experts.{}.gate_proj",
    "expert_up": "block_sparse_moe.experts.{}.up_proj",
    "expert_down": "block_sparse_moe.experts.{}.down_proj",
    "shared_gate_up": "shared_mlp.input_linear",
    "shared_down": "shared_mlp.output_linear",
}
GRANITE_MLP = {"gate_up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"}
GRANITE_STACKED = (
    Rewrite(r"(.*\.block_sparse_moe\.experts)\.gate_up_proj", r"\1.{}.{}.weight", True, parts=GATE_UP),
    Rewrite(r"(.*\.block_sparse_moe\.experts)\.down_proj", r"\1.{}.down_proj.weight", True),
    Rewrite(r"(.*\.block_sparse_moe\.router)\.weight", r"\1.layer.weight"),
    Rewrite(
        r"(.*\.block_sparse_moe)\.input_linear\.weight",
        r"\1.experts.{}.{}.weight",
        True,
        parts=GATE_UP,
        release=r"\1.input_linear.weight",
    ),
    Rewrite(
        r"(.*\.block_sparse_moe)\.output_linear\.weight",
        r"\1.experts.{}.down_proj.weight",
        True,
        release=r"\1.output_linear.weight",
    ),
)


def scan_mixers(config: HfConfig, layers: int) -> tuple[str, ...]:
    """The kind of each layer's mixer."""
    return tuple(SCAN if kind == "linear_attention" else ATTENTION for kind in layer_kinds(config, layers))


def scan_windows(config: HfConfig, layers: int) -> tuple[int, ...]:
    """Rows that a layer's convolution reads of each sequence; attention reads all."""
    taps = config.integer("mamba_d_conv", low=2, high=MOST_TAPS)
    return tuple(taps if kind == SCAN else 0 for kind in scan_mixers(config, layers))


def scan_sizes(**fixed: Any) -> Callable[[HfConfig, int], ScanSizes]:
    """A reader of the fields that the families have; `fixed` are further fields of `ScanSizes`.

    Numbers of heads that do not fit the channels or the groups are refused, and activations other than SiLU.
    """

    def read(config: HfConfig, layers: int) -> ScanSizes:
        width = config.integer("mamba_expand", high=64) * config.integer("hidden_size", high=1 << 20)
        inner = config.integer("mamba_d_ssm", width, high=1 << 24)
        heads, groups = config.integer("mamba_n_heads", high=1 << 16), config.integer("mamba_n_groups", high=1 << 12)
        size = config.raw.get("mamba_d_head")
        if heads * (inner // heads) != inner or size not in (None, "auto", inner // heads):
            raise config.fail("mamba_n_heads", f"is {heads}, heads of {size} are not {inner} channels")
        if heads % groups:
            raise config.fail("mamba_n_heads", f"is {heads}, must be a multiple of {groups} groups (mamba_n_groups)")
        if (act := config.text("mamba_hidden_act", config.text("hidden_act", "silu"))) not in ("silu", "swish"):
            raise config.fail("hidden_act", f"{act!r} is not supported behind a convolution; only silu is")
        if inner % 2:
            raise config.fail("mamba_n_heads", f"is {heads}, of {inner} channels, which must be an even number")
        low, high = time_step_limits(config)
        facts: dict[str, Any] = {"eps": config.number("rms_norm_eps", high=1.0)} | fixed
        state = config.integer("mamba_d_state", high=1 << 12)
        taps = config.integer("mamba_d_conv", low=2, high=MOST_TAPS)
        return ScanSizes(heads, inner // heads, groups, state, taps, low, high, **facts)

    return read


def time_step_limits(config: HfConfig) -> tuple[float, float]:
    """`time_step_limit`, whose end may be infinite, which JSON has no number for."""
    given = config.raw.get("time_step_limit") or [0.0, math.inf]
    ends = [float(end["__float__"]) if isinstance(end, dict) and "__float__" in end else end for end in given]
    if len(ends) != 2 or not all(isinstance(end, int | float) for end in ends) or not 0 <= ends[0] <= ends[1]:
        raise config.fail("time_step_limit", f"is {given!r:.80}, needs two numbers from 0 on, the second not smaller")
    return float(ends[0]), float(ends[1])


def rope_of_attention(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """Read one rope for all layers; those that scan turn nothing."""
    head_dim = config.integer("head_dim", config.integer("hidden_size") // config.integer("num_attention_heads"))
    return (read_rope(config, head_dim, config.integer("max_position_embeddings"), "full_attention"),) * layers


def granite_rope(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """Attention turns by positions only where `position_embedding_type` says so."""
    kind = config.text("position_embedding_type", "nope")
    if kind not in ("rope", "nope"):
        raise config.fail("position_embedding_type", f"{kind!r} is not known; known: rope, nope")
    return rope_of_attention(config, layers) if kind == "rope" else no_rope(config, layers)


def all_scan(config: HfConfig) -> list[str]:
    """`layer_types` where config.json has none: no layer attends."""
    return ["linear_attention"] * config.integer("num_hidden_layers", high=1024)


GRANITE_DEFAULTS = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "layer_types": all_scan,
    "rms_norm_eps": 1e-6,
}


def granite_hybrid(config: HfConfig) -> Family:
    """Experts beside a shared one, or, with `num_local_experts` 0, an MLP in the shared one's place."""
    dense = config.integer("num_local_experts", 8, low=0, high=1024) == 0
    eps, shared = config.number("rms_norm_eps", 1e-6, high=1.0), "shared_intermediate_size"
    experts: dict[str, Reader] = {} if dense else {"moe": read_moe(renormalize=True)}
    return Family(
        without(HYBRID, "gate", "up", "down") | (GRANITE_MLP if dense else GRANITE_EXPERTS),
        SCAN_DEFAULTS | GRANITE_DEFAULTS,
        experts | {"mixers": scan_mixers, "windows": scan_windows, "scan": scan_sizes(eps=eps), "rope": granite_rope},
        ("scan_scale",),
        SCAN_BIASES | {"attention_bias": (*QKV_BIAS, "o.bias")},
        granite_facts(config), rewrites=(*NAKED, *GRANITE_STACKED),
        spelling=(*LOCAL, ("intermediate_size" if dense else "shared_expert_intermediate_size", shared)),
    )  # fmt: skip


def bamba_kinds(config: HfConfig) -> list[str]:
    """`layer_types` by `attn_layer_indices`."""
    attend = config.integers("attn_layer_indices")
    layers = config.integer("num_hidden_layers", high=1024)
    return ["full_attention" if i in attend else "linear_attention" for i in range(layers)]


NEMOTRON_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
NEMOTRON_KINDS = {"linear_attention": SCAN, "full_attention": ATTENTION, "mlp": MLP, "moe": MLP}


NEMOTRON_DEFAULTS: dict[str, Any] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 21504,
    "max_position_embeddings": 4096,
    "layer_norm_epsilon": 1e-5,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "mamba_d_ssm": lambda c: c.integer("mamba_n_heads", high=1 << 16) * c.integer("mamba_d_head", high=1 << 16),
    "mamba_expand": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
}


def nemotron_kinds(config: HfConfig) -> tuple[str, ...]:
    """Each layer's kind: `layers_block_type`, or the letters of `hybrid_override_pattern`."""
    if config.has("layers_block_type"):
        kinds = tuple(EARLIER.get(kind, kind) for kind in config.texts("layers_block_type"))
    else:
        kinds = tuple(NEMOTRON_LETTERS.get(x, x) for x in config.text("hybrid_override_pattern"))
    for kind in kinds:
        if kind not in NEMOTRON_KINDS:
            known = ", ".join(NEMOTRON_KINDS)
            raise config.fail("layers_block_type", f"{kind!r} is not known; known: {known}")
    if config.integer("num_hidden_layers", len(kinds)) != len(kinds):
        raise config.fail("num_hidden_layers", f"is {config.raw['num_hidden_layers']}, kinds name {len(kinds)} layers")
    return kinds


def nemotron_experts(kinds: tuple[str, ...]) -> Callable[[HfConfig, int], MoE]:
    """Sigmoid scores, chosen with a correction bias, in the layers that `kinds` say."""

    def read(config: HfConfig, layers: int) -> MoE:
        if config.has("moe_latent_size") and config.flag("mlp_bias", False):
            raise config.fail("mlp_bias", "true is not supported beside moe_latent_size")
        return replace(
            sigmoid_experts(True)(config, layers),
            sparse=tuple(kind == "moe" for kind in kinds),
            shared=config.integer("moe_shared_expert_intermediate_size", high=1 << 24),
            latent=config.integer("moe_latent_size", 0, high=1 << 20),
        )

    return read


def nemotron_mtp(config: HfConfig, experts: Mapping[str, str]) -> MtpNames | None:
    """The layer for multi-token prediction: one that attends and one of `experts`, each with a norm; None for others,
    which are left out."""
    kinds = tuple(NEMOTRON_LETTERS.get(x, x) for x in config.text("mtp_hybrid_override_pattern", ""))
    kinds = kinds or tuple(EARLIER.get(kind, kind) for kind in config.texts("mtp_layers_block_type"))
    if not experts or kinds != ("full_attention", "moe") or config.integer("num_nextn_predict_layers", 1, low=0) > 1:
        return None
    attention, mixture = "layers.0.", "layers.1."
    roles = {role: attention + NEMOTRON[role] for role in ALONE} | {"mlp_norm": mixture + NEMOTRON["attn_norm"]}
    ends = (f"{attention}eh_proj", f"{attention}enorm", f"{attention}hnorm", f"{mixture}final_layernorm")
    return MtpNames("mtp.", "", *ends, roles=roles | {role: mixture + name for role, name in experts.items()})


NEMOTRON_BIASES = {"use_conv_bias": ("scan_conv.bias",), "use_bias": ("scan_in.bias", "scan_out.bias")}
NEMOTRON_SPELLING = (
    ("rms_norm_eps", "layer_norm_epsilon"),
    ("hidden_act", "mlp_hidden_act"),
    ("num_experts", "n_routed_experts"),
    ("mamba_n_heads", "mamba_num_heads"),
    ("mamba_d_head", "mamba_head_dim"),
    ("mamba_n_groups", "n_groups"),
    ("mamba_d_state", "ssm_state_size"),
    ("mamba_d_conv", "conv_kernel"),
)


def nemotron_reads(config: HfConfig, kinds: tuple[str, ...]) -> dict[str, Reader]:
    """What the layers of `kinds` are; those alone that scan read some rows, and none turns."""
    taps = config.integer("conv_kernel", 4, low=2, high=MOST_TAPS)
    mixers = tuple(NEMOTRON_KINDS[kind] for kind in kinds)
    experts = {"moe": nemotron_experts(kinds)} if "moe" in kinds else {}
    return {
        "mixers": lambda config, layers: mixers,
        "windows": lambda config, layers: tuple(taps if mixer == SCAN else 0 for mixer in mixers),
        "scan": scan_sizes(),
        "rope": no_rope,
        **experts,
    }


def nemotron_h(config: HfConfig) -> Family:
    """Each layer is a scan, attention without positions, an MLP or experts, alone."""
    kinds = nemotron_kinds(config)
    routed = NEMOTRON_EXPERTS | (LATENT_EXPERTS if config.has("moe_latent_size") else {}) if "moe" in kinds else {}
    shared = ("shared_up.bias", "shared_down.bias") if routed else ()
    return Family(
        NEMOTRON | routed,
        NEMOTRON_DEFAULTS | {"num_hidden_layers": len(kinds)},
        nemotron_reads(config, kinds),
        ("scan_scale", *(("router_bias",) if routed else ())),
        NEMOTRON_BIASES | {"mlp_bias": ("up.bias", "down.bias", *shared)},
        {"join": "single"}, NEMOTRON_SPELLING, prefix="backbone.", nested=("model.",), modules="model.",
        skipped=("mtp.",), rewrites=(*NAKED, *NEMOTRON_WRITTEN), mtp=nemotron_mtp(config, routed),
    )  # fmt: skip


NO_ATTENTION: dict[str, Any] = {"join": "single", "heads": 0, "kv_heads": 0, "intermediate": 0}
"""Facts of models all of whose layers scan."""
UNBOUNDED = {"max_position_embeddings": 16384, "num_attention_heads": 1, "intermediate_size": 1, "head_dim": 64}
"""What files of such models do not say; positions have no end."""


def scans_alone(
    names: dict[str, str],
    defaults: dict[str, Any],
    reads: dict[str, Any],
    required: tuple[str, ...],
    flags: dict[str, tuple[str, ...]],
    spelling: tuple[tuple[str, str], ...],
) -> Family:
    """A family whose layers are scans alone; arguments are those of `Family`, without what such families share."""
    return Family(
        BACKBONE | names,
        UNBOUNDED | {"conv_kernel": 4, "expand": 2, "use_conv_bias": True, "layer_norm_epsilon": 1e-5} | defaults,
        {"rope": endless, **reads},
        required,
        flags,
        NO_ATTENTION,
        (
            ("rms_norm_eps", "layer_norm_epsilon"),
            ("mamba_d_state", "state_size"),
            ("mamba_d_conv", "conv_kernel"),
            ("mamba_expand", "expand"),
            *spelling,
        ),
        prefix="backbone.",
        aliases={"embed": ("backbone.embedding",)},
        rewrites=NAKED,
    )


STATE_SPACE: dict[str, Family | Callable[[HfConfig], Family]] = {
    "granitemoehybrid": granite_hybrid,
    "bamba": Family(
        HYBRID | FEED_FORWARD,
        SCAN_DEFAULTS
        | {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 262144,
            "partial_rotary_factor": 0.5,
            "layer_types": bamba_kinds,
        },
        {"mixers": scan_mixers, "windows": scan_windows, "scan": scan_sizes(), "rope": rope_of_attention},
        ("scan_scale",),
        SCAN_BIASES | {"attention_bias": (*QKV_BIAS, "o.bias"), "mlp_bias": MLP_BIAS},
        rewrites=NAKED,
    ),
    "nemotron_h": nemotron_h,
    "mamba2": scans_alone(
        MIXER,
        {"num_heads": 128, "head_dim": 64, "n_groups": 8, "state_size": 128, "layer_types": all_scan},
        {"mixers": scan_mixers, "windows": scan_windows, "scan": scan_sizes()},
        ("scan_scale",),
        {"use_conv_bias": ("scan_conv.bias",), "use_bias": ("scan_in.bias", "scan_out.bias")},
        (("mamba_n_heads", "num_heads"), ("mamba_d_head", "head_dim"), ("mamba_n_groups", "n_groups")),
    ),
}
