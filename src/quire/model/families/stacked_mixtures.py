"""Rows of families whose own files keep a layer's experts in one matrix, turned or below each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.mixtures import EXPERTS, MIXTURES, SHARED
from quire.model.families.names import BIAS_FLAGS, GATE_UP, LLAMA, MLP_BIAS, without
from quire.model.families.readers import read_moe
from quire.model.families.row import Family
from quire.model.spec import MoE


def aria_experts(config: HfConfig, layers: int) -> MoE:
    """A softmax over the logits of the chosen, beside shared experts of the same activation."""
    if (act := config.text("hidden_act", "silu")) != "silu":
        raise config.fail("hidden_act", f"{act!r} is not supported: experts have silu, and shared ones this")
    moe = read_moe(renormalize=True)(config, layers)
    return replace(moe, shared=moe.intermediate * config.integer("moe_num_shared_experts", low=0, high=1024))


ARIA_STACKED = tuple(
    Rewrite(
        rf"(.*\.mlp\.experts)\.(?:{matrix}\.weight|{module})", name, True, True, parts, release=rf"\1.{matrix}.weight"
    )
    for matrix, module, name, parts in (
        ("fc1", "gate_up_proj", r"\1.{}.{}.weight", GATE_UP),
        ("fc2", "down_proj", r"\1.{}.down_proj.weight", ()),
    )
)
"""Stacked and turned, gate before up."""


def turned_experts(config: HfConfig) -> tuple[Rewrite, ...]:
    """Experts are stacked, and turned where rows are as long as those of the stream, or of an expert."""
    hidden, width = config.integer("hidden_size", high=1 << 20), config.integer("moe_intermediate_size", high=1 << 24)
    matrices = (("gate_up_proj", "{}.{}", GATE_UP, hidden), ("down_proj", "{}.down_proj", (), width))
    return tuple(
        Rewrite(
            rf"(.*\.mlp\.experts)\.{name}",
            rf"\1.{own}.weight",
            True,
            True,
            parts,
            release=rf"\1.{name}",
            columns=columns,
        )
        for name, own, parts, columns in matrices
    )


def qwen3_vl_moe(config: HfConfig) -> Family:
    """Qwen3-MoE with all weights of the chosen normed; experts are stacked, turned in files of the release."""
    family = MIXTURES["qwen3_moe"]
    assert isinstance(family, Family)
    read = {**family.read, "moe": read_moe(renormalize=True)}
    return replace(family, read=read, rewrites=turned_experts(config))


DBRX = {
    "embed": "transformer.wte",
    "final_norm": "transformer.norm_f",
    "head": "lm_head",
    "layer": "transformer.blocks.{}.",
    "attn_norm": "norm_attn_norm.norm_1",
    "mlp_norm": "norm_attn_norm.norm_2",
    "qkv": "norm_attn_norm.attn.Wqkv",
    "o": "norm_attn_norm.attn.out_proj",
    "router": "ffn.router.layer",
    "expert_gate": "ffn.experts.mlp.{}.w1",
    "expert_up": "ffn.experts.mlp.{}.v1",
    "expert_down": "ffn.experts.mlp.{}.w2",
}


def below_each_other(experts: int) -> tuple[Rewrite, ...]:
    """Matrices of all experts lie below each other, the last of each turned."""
    return tuple(
        Rewrite(
            rf"(.*\.ffn\.experts\.mlp)\.{name}",
            rf"\1.{{}}.{name}.weight",
            transposed=name == "w2",
            release=rf"\1.{name}",
            below=experts,
        )
        for name in ("w1", "v1", "w2")
    )


def dbrx_fields(config: HfConfig) -> dict[str, Any]:
    """Fields of the file's parts for attention and for experts, as others have them."""
    attention, experts = config.child("attn_config"), config.child("ffn_config")
    count = experts.integer("moe_num_experts", 4, high=1024)
    return {
        "num_key_value_heads": attention.integer("kv_n_heads", 1, high=1 << 12),
        "rope_theta": attention.number("rope_theta", 1e4),
        "hidden_act": experts.child("ffn_act_fn").text("name", "silu"),
        "intermediate_size": experts.integer("ffn_hidden_size", 3584, high=1 << 24),
        "num_experts": count,
        "num_experts_per_tok": experts.integer("moe_top_k", 1, high=count),
    }


def dbrx_experts(config: HfConfig, layers: int) -> MoE:
    """Softmax scores, whose sum over the chosen is one unless the file says null."""
    experts = config.child("ffn_config")
    if experts.number("moe_normalize_expert_weights", 1.0) != 1.0:
        raise experts.fail("moe_normalize_expert_weights", "is not supported; only 1, a sum of 1, is")
    renormalize = experts.raw.get("moe_normalize_expert_weights", 1.0) is not None
    return read_moe(renormalize=renormalize)(config, layers)


def dbrx(config: HfConfig) -> Family:
    """Grouped queries, limited."""
    fields = dbrx_fields(config)
    return Family(
        DBRX,
        {"max_seq_len": 2048, "rms_norm_eps": 1e-5, **fields},
        {"clip_qkv": lambda c, n: c.child("attn_config").number("clip_qkv", 0.0), "moe": dbrx_experts},
        facts={"norm": "layer"},
        spelling=(("hidden_size", "d_model"), ("num_attention_heads", "n_heads"), ("num_hidden_layers", "n_layers"),
                  ("max_position_embeddings", "max_seq_len")),
        prefix="transformer.",
        rewrites=below_each_other(fields["num_experts"]),
    )  # fmt: skip


STACKED_MIXTURES: Mapping[str, Family | Callable[[HfConfig], Family]] = {
    "aria_text": Family(
        without(LLAMA, "gate", "up", "down", "q_norm", "k_norm") | EXPERTS | SHARED | {"router": "mlp.router"},
        {"intermediate_size": 4096, "moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 2},
        {"moe": aria_experts},
        flags={
            "attention_bias": BIAS_FLAGS["attention_bias"],
            "mlp_bias": tuple(f"shared_{part}" for part in MLP_BIAS),
        },
        spelling=(("num_experts", "moe_num_experts"), ("num_experts_per_tok", "moe_topk")),
        rewrites=ARIA_STACKED,
    ),
    "dbrx": dbrx,
    "qwen3_vl_moe_text": qwen3_vl_moe,
}
