"""HRM-Text: two stacks of gated attention and MLPs that run in turns, with norms without weights.

Hierarchical reasoning model: Wang et al. 2025. transformers' `prefix_lm` lets tokens that a caller marks see each other
both ways; without marks, as here, each token sees those before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.names import BIAS_FLAGS, LLAMA, without
from quire.model.families.row import Family
from quire.model.layer_sizes import Streams, Turns

NAMES = without(LLAMA, "attn_norm", "mlp_norm", "final_norm", "q_norm", "k_norm") | {
    "attn_gate": "self_attn.gate_proj",
    "turn_start": "model.z_L_init",
}
RELEASED = {
    "attn.gqkv_proj.weight": ("self_attn.{}.weight", ("gate_proj", "q_proj", "k_proj", "v_proj")),
    "attn.o_proj.weight": ("self_attn.o_proj.weight", ()),
    "mlp.gate_up_proj.weight": ("mlp.{}.weight", ("gate_proj", "up_proj")),
    "mlp.down_proj.weight": ("mlp.down_proj.weight", ()),
}
"""Matrices of a layer in releases, which have some as one of equal parts."""


def turns(config: HfConfig, layers: int = 0) -> Turns:
    """How large the stacks are, and how often they run."""
    stack = config.integer("num_layers_per_stack", config.integer("num_hidden_layers"), high=1024)
    return Turns(stack, config.integer("L_cycles", 3, high=64), config.integer("H_cycles", 2, high=64))


def all_runs(config: HfConfig) -> Mapping[str, Any]:
    """Fields with the layers of all runs: files say so, or how many a stack has."""
    made, told = turns(config), config.integer("num_hidden_layers")
    if config.has("num_layers_per_stack") and told != made.layers:
        raise config.fail("num_hidden_layers", f"is {told}, the runs of both stacks have {made.layers} layers")
    return {**config.raw, "num_hidden_layers": made.layers, "num_layers_per_stack": made.stack}


def of_stacks(made: Turns) -> tuple[Rewrite, ...]:
    """Tensors of each stack, which release and transformers name in two ways, as those of layers: the second stack's
    follow the first's."""
    layers = [f"{stack}_module.layers.{number}." for stack in "LH" for number in range(made.stack)]
    return (
        Rewrite(r"(model\.|)z_L_init", r"\1z_L_init.weight", release=r"\1z_L_init"),
        *(
            Rewrite(
                rf"(model\.|){re.escape(own + name)}", rf"\1layers.{at}.{ours}", parts=parts, release=rf"\1{own}{name}"
            )
            for at, own in enumerate(layers)
            for name, (ours, parts) in RELEASED.items()
        ),
        *(
            Rewrite(rf"(model\.|){re.escape(own)}{begin}(.+)", rf"\1layers.{at}.{ours}\2")
            for at, own in enumerate(layers)
            for begin, ours in ((r"attn\.", "self_attn."), ("", ""))
        ),
    )


def hrm_text(config: HfConfig) -> Family:
    """Layers with a gate of what attention gives and as many keys as queries; embeddings are scaled."""
    return Family(
        NAMES,
        {"head_dim": 128, "embedding_scale": lambda c: 1.0 / c.number("initializer_range", 0.02)},
        {"kv_heads": lambda c, layers: c.integer("num_attention_heads"),
         "file_layers": lambda c, layers: turns(c).files,
         "streams": lambda c, layers: Streams(2, turns=turns(c)),
         "embed_scale": lambda c, layers: c.number("embedding_scale")},
        ("attn_gate", "turn_start"),
        {**BIAS_FLAGS, "attention_bias": (*BIAS_FLAGS["attention_bias"], "attn_gate.bias")},
        facts={"norm": "unit", "join": "own"}, older=all_runs, rewrites=of_stacks(turns(config)),
    )  # fmt: skip
