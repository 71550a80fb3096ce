"""The row of Falcon-H1 (TII 2025): attention and a selective scan read the same norm of a row, and an MLP follows.

A layer of the files is two here, that of the scan and that of attention and the MLP (`ModelSpec.file_layers`), since
what they keep of tokens has unlike windows.
"""

from __future__ import annotations

from typing import Any

from quire.model.disk.hf_config import HfConfig
from quire.model.families.names import MLP_BIAS, QKV_BIAS, without
from quire.model.families.readers import TWO_OF_EACH
from quire.model.families.rope import Rope
from quire.model.families.row import Family, Reader
from quire.model.families.state_space import (
    FEED_FORWARD,
    HYBRID,
    NAKED,
    SCAN_DEFAULTS,
    rope_of_attention,
    scan_sizes,
)
from quire.model.spec import ATTENTION, SCAN, Factors
from quire.ops.convolution import MOST_TAPS

BIASED = (("mamba_proj_bias", "ssm_in_multiplier"), ("attention_bias", "attention_in_multiplier"))
"""Flags of biases, and multipliers of what the matrices with these biases read."""


def windows(config: HfConfig, layers: int) -> tuple[int, ...]:
    """Rows that the convolutions of scans read; attention reads all."""
    return (config.integer("mamba_d_conv", low=2, high=MOST_TAPS), 0) * layers


def ropes(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """One rope; scans turn nothing."""
    return rope_of_attention(config, 2 * layers)


def multiplied(config: HfConfig) -> dict[str, Any]:
    """Facts of multipliers, which go into attention's scale and norms where they can."""
    for flag, multiplier in BIASED:
        if config.flag(flag, False) and config.number(multiplier, 1.0) != 1.0:
            raise config.fail(flag, f"true is not supported with {multiplier} {config.raw[multiplier]}")
    gate, down = config.numbers("mlp_multipliers", 2) if config.has("mlp_multipliers") else (1.0, 1.0)
    if config.flag("mlp_bias", False) and gate != 1.0:
        raise config.fail("mlp_bias", f"true is not supported with a multiplier of the gate ({gate})")
    into, key = config.number("attention_in_multiplier", 1.0), config.number("key_multiplier", 1.0)
    head_dim = config.integer(
        "head_dim", config.integer("hidden_size", 4096) // config.integer("num_attention_heads", 32)
    )
    out = into * config.number("attention_out_multiplier", 1.0)
    return {
        "factors": Factors(out, config.number("ssm_out_multiplier", 1.0), gate, down / gate),
        "attention_scale": head_dim**-0.5 * key * into**2,
        "embed_scale": config.number("embedding_multiplier", 1.0),
        "logit_scale": config.number("lm_head_multiplier", 1.0),
    }


def scans(config: HfConfig, normed: bool) -> Reader:
    """Sizes of the scans; multipliers of what they read, and of its parts, go into their convolutions."""
    parts = config.numbers("ssm_multipliers", 5) if config.has("ssm_multipliers") else (1.0,) * 5
    before = config.number("ssm_in_multiplier", 1.0)
    gate_first = not config.flag("mamba_norm_before_gate", True)
    return scan_sizes(normed=normed, gate_first=gate_first, factors=tuple(before * factor for factor in parts))


FALCON_DEFAULTS = SCAN_DEFAULTS | {
    "mamba_d_ssm": 1024,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
}


def falcon_h1(config: HfConfig) -> Family:
    """Two layers of each, that of the scan and that of attention and the MLP."""
    normed = config.flag("mamba_rms_norm", False)
    return Family(
        without(HYBRID | FEED_FORWARD, *(() if normed else ("scan_scale",))),
        FALCON_DEFAULTS,
        TWO_OF_EACH | {"mixers": lambda config, layers: (SCAN, ATTENTION) * layers, "windows": windows,
                       "scan": scans(config, normed), "rope": ropes},
        ("scan_scale",) if normed else (),
        {"mamba_conv_bias": ("scan_conv.bias",), "mamba_proj_bias": ("scan_in.bias",),
         "projectors_bias": ("scan_out.bias",), "attention_bias": (*QKV_BIAS, "o.bias"), "mlp_bias": MLP_BIAS},
        {"join": "twins", **multiplied(config)},
        rewrites=NAKED,
    )  # fmt: skip
