"""The rows of the table of families with selective scans of single channels (Mamba)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.names import GATE_UP, LLAMA, without
from quire.model.families.readers import no_rope, read_moe
from quire.model.families.row import Family
from quire.model.families.state_space import FEED_FORWARD, NAKED, scans_alone
from quire.model.spec import ATTENTION, CHANNEL_SCAN, ChannelSizes, MoE
from quire.ops.convolution import MOST_TAPS

CHANNELS = {
    "channel_in": "in_proj",
    "channel_conv": "conv1d",
    "channel_read": "x_proj",
    "channel_steps": "dt_proj",
    "channel_decay": "A_log",
    "channel_skip": "D",
    "channel_out": "out_proj",
}
MIXER = {role: f"mixer.{name}" for role, name in CHANNELS.items()}
JAMBA = without(LLAMA, "q_norm", "k_norm") | FEED_FORWARD | {
    **{role: f"mamba.{name}" for role, name in CHANNELS.items()},
    "channel_dt_scale": "mamba.dt_layernorm",
    "channel_b_scale": "mamba.b_layernorm",
    "channel_c_scale": "mamba.c_layernorm",
}  # fmt: skip
JAMBA_EXPERTS = {
    "router": "feed_forward.router",
    "expert_gate": "feed_forward.experts.{}.gate_proj",
    "expert_up": "feed_forward.experts.{}.up_proj",
    "expert_down": "feed_forward.experts.{}.down_proj",
}
JAMBA_WRITTEN = (
    Rewrite(r"(.*\.feed_forward\.experts)\.gate_up_proj", r"\1.{}.{}.weight", True, parts=GATE_UP),
    Rewrite(r"(.*\.feed_forward\.experts)\.down_proj", r"\1.{}.down_proj.weight", True),
)
NORMS = ("channel_dt_scale", "channel_b_scale", "channel_c_scale")


def expanded(config: HfConfig) -> int:
    """Channels by `mamba_expand`."""
    return config.integer("mamba_expand", high=64) * config.integer("hidden_size", high=1 << 20)


def channel_sizes(normed: str = "", width: str = "") -> Callable[[HfConfig, int], ChannelSizes]:
    """A reader of the fields; `normed`: that of the epsilon of norms of B, C and time steps, `width`: that of how many
    channels there are."""

    def read(config: HfConfig, layers: int) -> ChannelSizes:
        hidden = config.integer("hidden_size", high=1 << 20)
        inner = config.integer(width, high=1 << 24) if width else expanded(config)
        if inner % 2:
            raise config.fail(width or "mamba_expand", f"is {inner}, needs an even number of channels")
        if (act := config.text("hidden_act", "silu")) not in ("silu", "swish"):
            raise config.fail("hidden_act", f"{act!r} is not supported behind a convolution; only silu is")
        auto = config.raw.get("mamba_dt_rank") in (None, "auto")
        rank = math.ceil(hidden / 16) if auto else config.integer("mamba_dt_rank", high=1 << 16)
        taps = config.integer("mamba_d_conv", low=2, high=MOST_TAPS)
        eps = config.number(normed, 1e-6, high=1.0) if normed else 0.0
        return ChannelSizes(inner, config.integer("mamba_d_state", high=1 << 12), rank, taps, eps)

    return read


def jamba_mixers(config: HfConfig, layers: int) -> tuple[str, ...]:
    """Every `attn_layer_period`-th layer attends, from `attn_layer_offset` on."""
    every, first = config.integer("attn_layer_period"), config.integer("attn_layer_offset", low=0)
    return tuple(ATTENTION if i % every == first else CHANNEL_SCAN for i in range(layers))


def channel_windows(mixers: Callable[[HfConfig, int], tuple[str, ...]]) -> Callable[[HfConfig, int], tuple[int, ...]]:
    """A reader of the rows that a layer's convolution reads of each sequence; attention reads all."""

    def read(config: HfConfig, layers: int) -> tuple[int, ...]:
        taps = config.integer("mamba_d_conv", low=2, high=MOST_TAPS)
        return tuple(taps if kind == CHANNEL_SCAN else 0 for kind in mixers(config, layers))

    return read


def all_channels(config: HfConfig, layers: int) -> tuple[str, ...]:
    """No layer attends."""
    return (CHANNEL_SCAN,) * layers


def mamba(config: HfConfig) -> Family:
    """Scans alone."""
    return scans_alone(
        MIXER,
        {"tie_word_embeddings": True, "intermediate_size": expanded, "state_size": 16},
        {"mixers": all_channels, "windows": channel_windows(all_channels),
         "channels": channel_sizes(width="intermediate_size")},
        ("channel_steps.bias",),
        {"use_conv_bias": ("channel_conv.bias",), "use_bias": ("channel_in.bias", "channel_out.bias")},
        (("mamba_dt_rank", "time_step_rank"),),
    )  # fmt: skip


def falcon_mamba(config: HfConfig) -> Family:
    """Mamba with norms of B, C and time steps, which have no weights."""
    family = mamba(config)
    return replace(family, read={**family.read, "channels": channel_sizes("mixer_rms_eps", "intermediate_size")})


def jamba_experts(config: HfConfig, layers: int) -> MoE:
    """Every `expert_layer_period`-th layer has experts, from `expert_layer_offset` on."""
    every, first = config.integer("expert_layer_period"), config.integer("expert_layer_offset", low=0)
    sparse = tuple(i % every == first for i in range(layers))
    return replace(read_moe(renormalize=False)(config, layers), sparse=sparse)


JAMBA_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 262144,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
}


def jamba(config: HfConfig) -> Family:
    """Scans with norms of B, C and time steps, attention without positions, and experts in some layers."""
    several = config.integer("num_experts", 16, high=1024) > 1
    reads: dict[str, Any] = {"mixers": jamba_mixers, "windows": channel_windows(jamba_mixers),
                             "channels": channel_sizes("rms_norm_eps"), "rope": no_rope}  # fmt: skip
    return Family(
        JAMBA | (JAMBA_EXPERTS if several else {}),
        JAMBA_DEFAULTS,
        reads | ({"moe": jamba_experts} if several else {}),
        ("channel_steps.bias", *NORMS),
        {"mamba_conv_bias": ("channel_conv.bias",), "mamba_proj_bias": ("channel_in.bias", "channel_out.bias")},
        rewrites=(*NAKED, *JAMBA_WRITTEN),
    )


CHANNEL_SCANS: dict[str, Family | Callable[[HfConfig], Family]] = {
    "mamba": mamba,
    "falcon_mamba": falcon_mamba,
    "jamba": jamba,
}
