"""Tensors packed and ordered as relatives of a family store them, and config.json as they spell it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from oracle import edit_config, write

Tensors = dict[str, Tensor]
Config = dict[str, Any]


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = folder / "model.safetensors"
    save_file({name: t.contiguous() for name, t in change(load_file(path)).items()}, path)


def grouped_qkv(tensors: Tensors) -> Tensors:
    """Llama's tensors under InternLM2's names; each key/value head's two query heads, its key and its value."""
    names = {"model.embed_tokens": "model.tok_embeddings", "lm_head": "output", "self_attn.o_proj": "attention.wo",
             "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj":
             "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2"}  # fmt: skip
    found: Tensors = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        if "q_proj" in name:
            q, k, v = (tensors[name.replace("q_proj", f"{p}_proj")].unflatten(0, (-1, 16)) for p in "qkv")
            parts = [part for g in range(2) for part in (q[2 * g], q[2 * g + 1], k[g], v[g])]
            found[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(parts)
        elif "k_proj" not in name and "v_proj" not in name:
            found[name] = tensor
    return found


def packed_qkv(tensors: Tensors) -> Tensors:
    """Llama's tensors under Baichuan's names."""
    found = {name: t for name, t in tensors.items() if not any(f"{p}_proj" in name for p in "qkv")}
    for name in tensors:
        if "q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{p}_proj")] for p in "qkv"]
            found[name.replace("q_proj", "W_pack")] = torch.cat(parts)
    return found


def renamed(names: Mapping[str, str]) -> Callable[[Tensors], Tensors]:
    """Tensors whose names have, in the place of each key, its value."""

    def change(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, tensor in tensors.items():
            for old, new in names.items():
                name = name.replace(old, new)
            found[name] = tensor
        return found

    return change


LIKE_GPT2 = {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f", "model.layers": "transformer.h",
             "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "mlp.down_proj": "mlp.c_proj"}  # fmt: skip
as_exaone = renamed(LIKE_GPT2 | {"self_attn.o_proj": "attn.attention.out_proj", "self_attn": "attn.attention",
                                 "mlp.gate_proj": "mlp.c_fc_0", "mlp.up_proj": "mlp.c_fc_1"})  # fmt: skip


def as_qwen(tensors: Tensors) -> Tensors:
    """Qwen 2's tensors under the first Qwen's names."""
    kept = {n: t for n, t in tensors.items() if not any(f"{p}_proj" in n for p in "qkv")}
    for name in tensors:
        if "q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{p}_proj")] for p in "qkv"]
            kept[name.replace("self_attn.q_proj", "attn.c_attn")] = torch.cat(parts)
    names = {"self_attn.o_proj": "attn.c_proj", "mlp.gate_proj": "mlp.w2", "mlp.up_proj": "mlp.w1"}
    return renamed(LIKE_GPT2 | names)(kept)


def as_chatglm(tensors: Tensors) -> Tensors:
    """GLM's tensors under ChatGLM's names."""
    kept = {n: t for n, t in tensors.items() if not any(f"{p}_proj" in n for p in "qkv")}
    for name in tensors:
        if "q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{p}_proj")] for p in "qkv"]
            kept[name.replace("self_attn.q_proj", "self_attention.query_key_value")] = torch.cat(parts)
    return renamed(
        {
            "model.embed_tokens": "transformer.embedding.word_embeddings",
            "model.norm": "transformer.encoder.final_layernorm",
            "model.layers": "transformer.encoder.layers",
            "lm_head": "transformer.output_layer",
            "self_attn.o_proj": "self_attention.dense",
            "mlp.gate_up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        }
    )(kept)


def as_bailing(tensors: Tensors) -> Tensors:
    """Another mixture's tensors under the names of Ling's files, queries, keys and values in one matrix."""
    kept = {n: t for n, t in tensors.items() if not any(f"{p}_proj" in n for p in "qkv")}
    for name in tensors:
        if "q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{p}_proj")] for p in "qkv"]
            kept[name.replace("self_attn.q_proj", "attention.query_key_value")] = torch.cat(parts)
    return renamed(
        {
            "model.embed_tokens": "model.word_embeddings",
            "self_attn.o_proj": "attention.dense",
            "self_attn.q_norm": "attention.query_layernorm",
            "self_attn.k_norm": "attention.key_layernorm",
            "gate.e_score_correction_bias": "gate.expert_bias",
        }
    )(kept)


def as_step3p5(tensors: Tensors) -> Tensors:
    """Step 3.5's tensors under the names of its release, gates and what they multiply apart."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        base, both, _ = name.partition("mlp.experts.gate_up_proj")
        if both:
            gate, up = tensor.chunk(2, 1)
            found |= {f"{base}moe.gate_proj.weight": gate, f"{base}moe.up_proj.weight": up}
        else:
            found[name] = tensor
    return renamed(
        {
            "mlp.experts.down_proj": "moe.down_proj.weight",
            "mlp.gate.e_score_correction_bias": "moe.router_bias",
            "mlp.gate.weight": "moe.gate.weight",
            "mlp.shared_experts.": "share_expert.",
        }
    )(found)


def without_decays(tensors: Tensors) -> Tensors:
    """MiniMax's tensors without what follows from the number of heads and the layer."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(("_decay", "slope_rate"))}


def as_plamo(tensors: Tensors) -> Tensors:
    """A parallel model's tensors under PLaMo's names: pairs that turn lie apart, heads take the two keys in turns."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            tensor = tensor.unflatten(0, (-1, 8, 2)).transpose(1, 2).flatten(0, 2)
        if "q_proj" in name:
            tensor = tensor.unflatten(0, (2, 2, 16)).transpose(0, 1).flatten(0, 2)
        if "o_proj" in name:
            tensor = tensor.unflatten(1, (2, 2, 16)).transpose(1, 2).flatten(1, 3)
        found[name.replace("model.layers.", "model.layers.layers.").replace("input_layernorm", "norm")] = tensor
    return found


def as_deepseek(tensors: Tensors) -> Tensors:
    """Aria's tensors under DeepSeekMoE's names, experts one by one."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        prefix, _, matrix = name.partition("experts.fc")
        for e, turned in enumerate(tensor) if matrix else ():
            halves = turned.t().chunk(2) if matrix.startswith("1") else (turned.t(),)
            parts = ("gate", "up") if len(halves) == 2 else ("down",)
            found |= {f"{prefix}experts.{e}.{p}_proj.weight": h for p, h in zip(parts, halves, strict=True)}
        if not matrix:
            found[name.replace("mlp.router.", "mlp.gate.")] = tensor
    return found


def turned_experts(tensors: Tensors) -> Tensors:
    """Qwen 3's experts stacked and turned, gate beside up."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for prefix in {name.partition("experts.")[0] for name in tensors if ".experts." in name}:
        count = sum(name.startswith(f"{prefix}experts.") for name in tensors) // 3

        def stack(part: str, prefix: str = prefix, count: int = count) -> Tensor:
            return torch.stack([tensors[f"{prefix}experts.{e}.{part}_proj.weight"].t() for e in range(count)])

        found[f"{prefix}experts.gate_up_proj"] = torch.cat((stack("gate"), stack("up")), -1)
        found[f"{prefix}experts.down_proj"] = stack("down")
    return found


@dataclass(frozen=True)
class Relative:
    """A family of the table that transformers has no code for: an equal model of `base`, made with `facts`.

    `change` makes its tensors of that model's, `fields` its fields of config.json of that model's; None removes one.
    """

    base: str = "llama"
    change: Callable[[Tensors], Tensors] = dict
    facts: Config = field(default_factory=dict)
    fields: Callable[[Config], Config] = lambda config: {}


WHOLE_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}
ARIA = {"moe_num_experts": 6, "moe_topk": 3, "intermediate_size": 128, "head_dim": 16}
SAID = {"norm_topk_prob": True, "moe_intermediate_size": 128, "first_k_dense_replace": 0}
LATENTS = {"kv_lora_rank": 64, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 64,
           "num_key_value_heads": 4, "first_k_dense_replace": 1}  # fmt: skip
FEW = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "n_shared_experts": 2,
       "n_group": 4, "topk_group": 2}  # fmt: skip
MINIMAX_PARTS = {"full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp"}
MINIMAX = Relative(
    "minimax",
    facts={
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 128,
        "block_size": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        **{f"{part}_alpha_factor": 3.5 for part in MINIMAX_PARTS},
        **{f"{part}_beta_factor": 0.75 for part in MINIMAX_PARTS},
    },
    fields=lambda c: {
        "attn_type_list": [0, 1, 0],
        "postnorm": True,
        "shared_intermediate_size": 0,
        "rotary_dim": 16,
        "layer_types": None,
        **{f"layernorm_{own}_alpha": 3.5 for own in MINIMAX_PARTS.values()},
        **{f"layernorm_{own}_beta": 0.75 for own in MINIMAX_PARTS.values()},
        **{f"{part}_{name}_factor": None for part in MINIMAX_PARTS for name in ("alpha", "beta")},
    },
)
"""As its first release has it."""
RELATIVES: dict[str, Relative] = {
    "minimax_m1": MINIMAX,
    "minimax_text_01": MINIMAX,
    "deepseek": Relative(
        "aria_text",
        as_deepseek,
        ARIA,
        lambda c: SAID | {"n_routed_experts": 6, "num_experts_per_tok": 3, "n_shared_experts": 2},
    ),
    "bailing_moe": Relative(
        "aria_text",
        lambda t: as_bailing(as_deepseek(t)),
        ARIA,
        lambda c: SAID | {"num_experts": 6, "num_experts_per_tok": 3, "num_shared_experts": 2},
    ),
    "bailing_moe_v2": Relative(
        "glm4_moe",
        as_bailing,
        FEW | {"use_qk_norm": True, "head_dim": 16, "first_k_dense_replace": 1},
        lambda c: {
            "num_experts": 8,
            "num_shared_experts": c["n_shared_experts"],
            "n_routed_experts": None,
            "n_shared_experts": None,
        },
    ),
    "kimi_k2": Relative("deepseek_v3", facts=LATENTS | FEW),
    "qwen3_vl_moe_text": Relative(
        "qwen3_moe",
        turned_experts,
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 128,
            "head_dim": 16,
            "norm_topk_prob": True,
        },
    ),
    "internlm2": Relative(change=grouped_qkv),
    "baichuan": Relative(change=packed_qkv, facts={"num_key_value_heads": 4}),
    "gpt-sw3": Relative("gpt2"),
    "aquila": Relative(),
    "xverse": Relative(facts={"num_key_value_heads": 4}),
    "internlm": Relative(
        facts={
            "num_key_value_heads": 4,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
        fields=lambda c: {
            "bias": True,
            "rotary": {"base": 500000, "type": "dynamic"},
            "attention_bias": None,
            "rope_parameters": None,
        },
    ),
    "chatglm": Relative(
        "glm",
        as_chatglm,
        {
            "head_dim": 16,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
        },
        lambda c: (
            {
                "num_layers": c["num_hidden_layers"],
                "ffn_hidden_size": c["intermediate_size"],
                "padded_vocab_size": c["vocab_size"],
                "vocab_size": 7,
                "kv_channels": 16,
                "multi_query_attention": True,
                "multi_query_group_num": 2,
                "layernorm_epsilon": 1e-3,
                "seq_length": 64,
                "rope_ratio": 50,
                "add_qkv_bias": True,
                "add_bias_linear": False,
            }
            | dict.fromkeys(("num_hidden_layers", "intermediate_size", "num_key_value_heads", "rms_norm_eps"))
            | dict.fromkeys(("head_dim", "rope_parameters", "attention_bias"))
        ),
    ),
    "exaone": Relative(
        change=as_exaone,
        facts={"rms_norm_eps": 1e-3},
        fields=lambda c: {
            "num_layers": c["num_hidden_layers"],
            "activation_function": c["hidden_act"],
            "layer_norm_epsilon": c["rms_norm_eps"],
            "num_hidden_layers": None,
            "hidden_act": None,
            "rms_norm_eps": None,
        },
    ),
    "minicpm": Relative(
        "granite",
        facts={
            "embedding_multiplier": 12.0,
            "residual_multiplier": 1.4 / 3**0.5,
            "logits_scaling": 64 / 16,
            "attention_multiplier": 16**-0.5,
            "tie_word_embeddings": True,
        },
        fields=lambda c: (
            {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}
            | {f"{name}_multiplier": None for name in ("embedding", "residual", "attention")}
            | {"logits_scaling": None}
        ),
    ),
    "orion": Relative(
        "stablelm",
        facts=WHOLE_ROPE | {"use_parallel_residual": False, "use_qkv_bias": False, "layer_norm_eps": 1e-3},
        fields=lambda c: {"rms_norm_eps": c["layer_norm_eps"], "layer_norm_eps": None},
    ),
    "plamo": Relative(
        "cohere2_moe",
        as_plamo,
        {
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "logit_scale": 1.0,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention"] * 3,
            "mlp_layer_types": ["dense"] * 3,
        },
        lambda c: {"n_shared_head": 2, "num_key_value_heads": None, "layer_types": None, "mlp_layer_types": None},
    ),
    "qwen": Relative(
        "qwen2",
        as_qwen,
        {"num_key_value_heads": 4, "rms_norm_eps": 1e-3},
        lambda c: {
            "intermediate_size": 2 * c["intermediate_size"],
            "layer_norm_epsilon": c["rms_norm_eps"],
            "rms_norm_eps": None,
            "seq_length": 64,
            "kv_channels": 16,
        },
    ),
}


def write_relative(folder: Path, family: str, **facts: Any) -> PreTrainedModel:
    """Write a tiny checkpoint of a family of `RELATIVES`; returns the equal model."""
    own = RELATIVES[family]
    oracle = write(folder, own.base, **own.facts | facts)
    rewrite(folder, own.change)
    fields = own.fields(json.loads((folder / "config.json").read_text()))
    edit_config(folder, **fields | {"model_type": family, "architectures": None})
    return oracle
