"""Llama 4's decoder (Meta AI 2025): layers that rope turns attend in chunks, and each token takes one expert."""

from __future__ import annotations

from dataclasses import replace

from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.names import BIAS_FLAGS, GATE_UP, LLAMA, without
from quire.model.families.query_scale import QueryScale
from quire.model.families.readers import read_moe, smollm3_rope
from quire.model.families.row import Family, layer_kinds
from quire.model.spec import MoE

MOST_STEPS = 1 << 20
"""Factors of queries that a table holds."""


def turned(config: HfConfig) -> list[int]:
    """Give `no_rope_layers`: 1 for each layer that rope turns, else 0."""
    layers, every = config.integer("num_hidden_layers", high=1024), config.integer("no_rope_layer_interval", 4)
    return [int((i + 1) % every != 0) for i in range(layers)]


def chunked_kinds(config: HfConfig) -> list[str]:
    """`layer_types` where those layers that rope turns attend in chunks."""
    turns = config.integers("no_rope_layers") or turned(config)
    return ["chunked_attention" if turn else "full_attention" for turn in turns]


def chunked_windows(config: HfConfig, layers: int) -> tuple[int, ...]:
    """Rows of chunked layers see their own chunk of `attention_chunk_size` tokens."""
    size = config.integer("attention_chunk_size", 0)
    return tuple(-size if kind == "chunked_attention" else 0 for kind in layer_kinds(config, layers))


def unit_norms(config: HfConfig, layers: int) -> tuple[bool, ...]:
    """Layers that rope turns norm queries and keys, without weights."""
    normed = config.flag("use_qk_norm", True)
    return tuple(normed and rope.dim > 0 for rope in smollm3_rope(config, layers))


def tempered(config: HfConfig, layers: int) -> QueryScale:
    """Queries of layers that rope does not turn grow with the logarithm of their position."""
    if not config.flag("attn_temperature_tuning", True):
        return QueryScale()
    step, longest = config.integer("floor_scale", 8192), config.integer("max_position_embeddings", high=1 << 27)
    if longest // step >= MOST_STEPS:
        raise config.fail("floor_scale", f"is {step}: {longest} positions would have more than {MOST_STEPS} factors")
    still = tuple(rope.dim == 0 for rope in smollm3_rope(config, layers))
    return QueryScale(step, config.number("attn_scale", 0.1, low=-1), 1, still)


def scored_experts(config: HfConfig, layers: int) -> MoE:
    """One expert a token, whose input the score multiplies, beside one that all tokens take, of the same width."""
    if (count := config.integer("num_experts_per_tok", 1)) != 1:
        raise config.fail(
            "num_experts_per_tok", f"is {count}; scores multiply rows before the experts, of which only 1"
        )
    step = config.integer("interleave_moe_layer_step", 1)
    held = config.integers("moe_layers") if config.has("moe_layers") else range(step - 1, layers, step)
    found = read_moe(renormalize=True)(config, layers)  # a softmax tells large logits apart, of which a sigmoid is 1
    sparse = tuple(i in held for i in range(layers))
    return replace(found, sparse=sparse, shared=found.intermediate, input_scores="sigmoid")


_STACKS = tuple(
    Rewrite(
        rf"(.*\.feed_forward\.experts)\.{matrix}",
        rf"\1.{{}}.{own}.weight",
        stacked=True,
        transposed=True,
        parts=parts,
        release=rf"\1.{matrix}",
    )
    for matrix, own, parts in (("gate_up_proj", "{}", GATE_UP), ("down_proj", "down_proj", ()))
)
LLAMA4_TEXT = Family(
    without(LLAMA, "q_norm", "k_norm") | {f"{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
    | {"router": "feed_forward.router"}
    | {f"expert_{part}": f"feed_forward.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
    | {f"shared_{part}": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
     "max_position_embeddings": 131072, "num_local_experts": 16, "attention_chunk_size": 8192,
     "intermediate_size_mlp": 16384, "no_rope_layers": turned, "layer_types": chunked_kinds},
    {"intermediate": lambda config, layers: config.integer("intermediate_size_mlp", high=1 << 24), "rope": smollm3_rope,
     "windows": chunked_windows, "unit_norms": unit_norms, "query_scale": tempered, "moe": scored_experts},
    flags=BIAS_FLAGS,
    facts={"interleaved_rope": True},
    spelling=(("num_experts", "num_local_experts"),),
    rewrites=_STACKS,
)  # fmt: skip
