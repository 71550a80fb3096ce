"""The rows of the table of families whose layers have mixers of several kinds."""

from __future__ import annotations

from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.delta_sizes import DeltaSizes
from quire.model.families.mixtures import EXPERTS, SHARED_EXPERT
from quire.model.families.names import LLAMA, OWN_MTP, STACKED, naked, without
from quire.model.families.readers import read_moe
from quire.model.families.rope import Rope, read_rope
from quire.model.families.row import Family, Reader, layer_kinds
from quire.model.mixers.short_conv import TOGETHER
from quire.model.spec import ATTENTION, CONVOLUTION, DELTA, ConvSizes
from quire.ops.convolution import MOST_TAPS

LFM2 = LLAMA | {
    "final_norm": "model.embedding_norm",
    "attn_norm": "operator_norm",
    "mlp_norm": "ffn_norm",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
    "o": "self_attn.out_proj",
    "conv_in": "conv.in_proj",
    "conv": "conv.conv",
    "conv_out": "conv.out_proj",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
}
LFM2_MOE = LFM2 | {
    "router": "feed_forward.gate",
    "router_bias": "feed_forward.gate_correction",
    "expert_gate": "feed_forward.experts.{}.w1",
    "expert_up": "feed_forward.experts.{}.w3",
    "expert_down": "feed_forward.experts.{}.w2",
}
LFM2_MOE_WRITTEN = (
    Rewrite(
        r"(.*\.feed_forward)\.expert_bias", r"\1.gate_correction.weight", release=r"\1.expert_bias"
    ),
    Rewrite(r"(.*\.feed_forward\.experts)\.gate_up_proj", r"\1.{}.{}.weight", True, parts=("w1", "w3")),
    Rewrite(r"(.*\.feed_forward\.experts)\.down_proj", r"\1.{}.w2.weight", True),
    *(
        Rewrite(rf"(.*\.feed_forward\.experts\.\d+)\.{module}_proj(\..+)", rf"\1.{name}\2")
        for module, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    ),
)  # fmt: skip
"""The release's names of experts, and those of modules that other tools write."""


def lfm2_kinds(config: HfConfig) -> list[str]:
    """`layer_types` of older files, which list the layers that attend; without a list all do."""
    layers = config.integer("num_hidden_layers", high=1024)
    attend = config.integers("full_attn_idxs") if config.has("full_attn_idxs") else tuple(range(layers))
    return ["full_attention" if i in attend else "conv" for i in range(layers)]


def mixers(config: HfConfig, layers: int) -> tuple[str, ...]:
    """The kind of each layer's mixer."""
    return tuple(CONVOLUTION if kind == "conv" else ATTENTION for kind in layer_kinds(config, layers))


def conv_sizes(config: HfConfig, layers: int) -> ConvSizes:
    """`conv_L_cache` rows of as many channels as the stream has; channels that ranks cannot share are refused."""
    width = config.integer("hidden_size", high=1 << 20)
    if width % TOGETHER:
        raise config.fail("hidden_size", f"is {width}, channels of a convolution must be a multiple of {TOGETHER}")
    return ConvSizes(width, config.integer("conv_L_cache", low=2, high=MOST_TAPS))


def conv_windows(config: HfConfig, layers: int) -> tuple[int, ...]:
    """Rows that a layer reads of each sequence: a convolution its taps, attention all."""
    taps = config.integer("conv_L_cache", low=2, high=MOST_TAPS)
    return tuple(taps if kind == "conv" else 0 for kind in layer_kinds(config, layers))


def one_rope(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """Read one rope for all layers; those that convolve turn nothing."""
    head_dim = config.integer("head_dim", config.integer("hidden_size") // config.integer("num_attention_heads"))
    return (read_rope(config, head_dim, config.integer("max_position_embeddings"), "full_attention"),) * layers


def lfm2_width(config: HfConfig, layers: int) -> int:
    """Width of the MLP: two thirds of what is said, rounded up, where `block_auto_adjust_ff_dim` says so."""
    width, factor = config.integer("intermediate_size", high=1 << 24), "block_ffn_dim_multiplier"
    if not config.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    if config.raw.get(factor, 1.0) is None:
        return width
    width = int(config.number(factor, 1.0) * width)
    step = config.integer("block_multiple_of", 256)
    return -(-width // step) * step


LFM2_DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 128000,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "layer_types": lfm2_kinds,
}
LFM2_READS = {"mixers": mixers, "conv": conv_sizes, "windows": conv_windows, "rope": one_rope}
LFM2_SPELLING = (("rms_norm_eps", "norm_eps"), ("tie_word_embeddings", "tie_embedding"))
CONV_BIASES = {"conv_bias": ("conv_in.bias", "conv.bias", "conv_out.bias")}

QWEN_NEXT = without(LLAMA, "q") | {
    "q_gate": "self_attn.q_proj",
    "delta_conv": "linear_attn.conv1d",
    "delta_decay": "linear_attn.A_log",
    "delta_bias": "linear_attn.dt_bias",
    "delta_scale": "linear_attn.norm",
    "delta_out": "linear_attn.out_proj",
}
QWEN3_NEXT = QWEN_NEXT | EXPERTS | SHARED_EXPERT | {
    "delta_qkvz": "linear_attn.in_proj_qkvz",
    "delta_ba": "linear_attn.in_proj_ba",
}  # fmt: skip
QWEN3_5 = QWEN_NEXT | {
    "delta_qkv": "linear_attn.in_proj_qkv",
    "delta_z": "linear_attn.in_proj_z",
    "delta_b": "linear_attn.in_proj_b",
    "delta_a": "linear_attn.in_proj_a",
}
NAKED = naked(["linear_attn"], ["A_log", "dt_bias"])
FURTHER = ("mtp.",)
"""Of a layer that predicts further tokens."""


def delta_kinds(config: HfConfig) -> list[str]:
    """`layer_types` where config.json has none: every `full_attention_interval`-th layer attends."""
    every = config.integer("full_attention_interval", 4)
    layers = config.integer("num_hidden_layers", high=1024)
    return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]


def delta_mixers(config: HfConfig, layers: int) -> tuple[str, ...]:
    """The kind of each layer's mixer."""
    return tuple(DELTA if kind == "linear_attention" else ATTENTION for kind in layer_kinds(config, layers))


def delta_sizes(config: HfConfig, layers: int) -> DeltaSizes:
    """Heads and their sizes; a number of value heads that key heads cannot share is refused."""
    keys, values = (config.integer(f"linear_num_{kind}_heads", high=4096) for kind in ("key", "value"))
    if values % keys:
        raise config.fail("linear_num_value_heads", f"is {values}, must be a multiple of {keys} key heads")
    key_dim, value_dim = (config.integer(f"linear_{kind}_head_dim", high=4096) for kind in ("key", "value"))
    taps = config.integer("linear_conv_kernel_dim", low=2, high=MOST_TAPS)
    return DeltaSizes(keys, values, key_dim, value_dim, taps)


def delta_windows(config: HfConfig, layers: int) -> tuple[int, ...]:
    """Rows that a layer's convolution reads of each sequence; attention reads all."""
    taps = config.integer("linear_conv_kernel_dim", low=2, high=MOST_TAPS)
    return tuple(0 if kind == ATTENTION else taps for kind in delta_mixers(config, layers))


QWEN_NEXT_DEFAULTS = {
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": delta_kinds,
}
DELTA_READS: dict[str, Reader] = {"mixers": delta_mixers, "delta": delta_sizes, "windows": delta_windows}
"""Of the gated delta rule."""
QWEN_NEXT_READS: dict[str, Reader] = DELTA_READS | {"rope": one_rope}
QWEN_NEXT_BIASES = {"attention_bias": ("q_gate.bias", "k.bias", "v.bias", "o.bias")}
QWEN_NEXT_EXPERTS = {
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}

HYBRIDS = {
    "qwen3_next": Family(
        QWEN3_NEXT,
        QWEN_NEXT_DEFAULTS | QWEN_NEXT_EXPERTS | {"num_key_value_heads": 2},
        QWEN_NEXT_READS | {"moe": read_moe()},
        ("q_norm", "k_norm", "attn_gate", "shared_switch"),
        QWEN_NEXT_BIASES,
        {"norm": "rms1p"},
        rewrites=(*NAKED, *STACKED),
        skipped=FURTHER,
        mtp=OWN_MTP,
    ),
    "qwen3_5_text": Family(
        QWEN3_5,
        QWEN_NEXT_DEFAULTS | {"num_key_value_heads": 4},
        QWEN_NEXT_READS,
        ("q_norm", "k_norm", "attn_gate"),
        QWEN_NEXT_BIASES,
        {"norm": "rms1p"},
        rewrites=NAKED,
        skipped=FURTHER,
        mtp=OWN_MTP,
    ),
    "qwen3_5_moe_text": Family(
        QWEN3_5 | EXPERTS | SHARED_EXPERT,
        QWEN_NEXT_DEFAULTS
        | QWEN_NEXT_EXPERTS
        | {"num_experts": 256, "num_experts_per_tok": 8, "num_key_value_heads": 2, "intermediate_size": 512},
        QWEN_NEXT_READS | {"moe": read_moe("softmax", True)},
        ("q_norm", "k_norm", "attn_gate", "shared_switch"),
        QWEN_NEXT_BIASES,
        {"norm": "rms1p"},
        rewrites=(*NAKED, *STACKED),
        skipped=FURTHER,
        mtp=OWN_MTP,
    ),
    "lfm2": Family(
        LFM2,
        LFM2_DEFAULTS | {"intermediate_size": 12288},
        LFM2_READS | {"intermediate": lfm2_width},
        ("q_norm", "k_norm"),
        CONV_BIASES,
        spelling=(*LFM2_SPELLING, ("intermediate_size", "block_ff_dim")),
    ),
    "lfm2_moe": Family(
        LFM2_MOE,
        LFM2_DEFAULTS | {"intermediate_size": 7168, "moe_intermediate_size": 1792, "first_k_dense_replace": 2,
                         "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True, "use_expert_bias": True},
        LFM2_READS | {"moe": read_moe("sigmoid")},
        ("q_norm", "k_norm"),
        CONV_BIASES | {"use_expert_bias": ("router_bias",)},
        spelling=(*LFM2_SPELLING, ("first_k_dense_replace", "num_dense_layers")),
        rewrites=LFM2_MOE_WRITTEN,
    ),
}  # fmt: skip
