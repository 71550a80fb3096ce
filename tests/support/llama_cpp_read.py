"""Folders of architectures whose GGUF files are read here and not written: as their releases have them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from family_tensors import Tensors, rewrite
from gguf_writing import SHAPE
from oracle import edit_config, write

SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
TAKING_TURNS = SECTIONS | {"mrope_section": [3, 3, 2]}
"""Sections that take turns, which leave no frequency over: llama.cpp does not turn one that is left."""
XD = {"rope_type": "xdrope", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0, "xdrope_section": [2, 2, 2, 2]}
FEW = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}


class Released(NamedTuple):
    """A model of transformers, facts of it, fields of config.json, and how the release has its tensors."""

    base: str
    facts: dict[str, Any]
    fields: dict[str, Any]
    change: Callable[[Tensors], Tensors] = lambda tensors: tensors


def turned_experts(tensors: Tensors) -> Tensors:
    """The tensors with matrices of experts [k, n]."""
    return {n: t.transpose(1, 2).contiguous() if t.ndim == 3 else t for n, t in tensors.items()}


def named(tensors: Tensors, names: dict[str, str], joined: dict[str, tuple[str, ...]]) -> Tensors:
    """The tensors under GPT-2's names: `names` of modules, and modules that are `joined` of others, by rows."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(?:model\.(layers\.\d+\.)?)?(.+)\.(weight|bias)", name)
        assert match is not None
        layer, module, part = match.groups()
        outer = f"transformer.{layer.replace('layers', 'h')}" if layer else "transformer."
        whole = next((whole for whole, parts in joined.items() if module in parts), "")
        if module == "lm_head":
            found[name] = tensor
        elif not whole:
            found[f"{outer}{names.get(module, module)}.{part}"] = tensor
        elif module == joined[whole][0]:
            ends = [f"model.{layer}{end}.{part}" for end in joined[whole]]
            found[f"{outer}{whole}.{part}"] = torch.cat([tensors[end] for end in ends])
    return found


OUTER = {"embed_tokens": "wte", "norm": "ln_f", "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2",
         "self_attn.o_proj": "attn.c_proj"}  # fmt: skip
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def as_codeshell(tensors: Tensors) -> Tensors:
    """The tensors of a StarCoder 2 as CodeShell has them."""
    return named(tensors, OUTER, {"attn.c_attn": QKV})


def as_refact(tensors: Tensors) -> Tensors:
    """The tensors of a Llama as Refact has them."""
    gates = "mlp.gate_proj", "mlp.up_proj"
    return named(tensors, OUTER | {"self_attn.q_proj": "attn.q", "mlp.down_proj": "mlp.c_proj"},
                 {"attn.kv": QKV[1:], "mlp.gate_up_proj": gates})  # fmt: skip


OF_GPT = {"n_positions": 128, "n_embd": 64, "n_head": 4, "layer_norm_epsilon": 1e-5}
READ_ONLY: dict[str, Released] = {
    "pangu-embedded": Released("llama", {"attention_bias": True}, {"architectures": ["PanguEmbeddedForCausalLM"]}),
    "qwen2vl": Released(
        "qwen2", {}, {"architectures": ["Qwen2VLForConditionalGeneration"], "rope_parameters": SECTIONS}
    ),
    "qwen3vl": Released(
        "qwen3",
        {"head_dim": 16},
        {"architectures": ["Qwen3VLForConditionalGeneration"], "rope_parameters": TAKING_TURNS},
    ),
    "qwen3vlmoe": Released(
        "qwen3_moe",
        {"head_dim": 16} | FEW,
        {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "rope_parameters": TAKING_TURNS},
        turned_experts,
    ),
    "paddleocr": Released(
        "ernie4_5",
        {"head_dim": 16},
        {"architectures": ["PaddleOCRVLForConditionalGeneration"], "rope_parameters": SECTIONS},
    ),
    "hunyuan_vl": Released(
        "hunyuan_v1_dense",
        {"head_dim": 16},
        {
            "architectures": ["HunYuanVLForConditionalGeneration"],
            "rope_parameters": XD,
        },
    ),
    "codeshell": Released(
        "starcoder2",
        {"intermediate_size": 256, "tie_word_embeddings": False},
        OF_GPT | {"architectures": ["CodeShellForCausalLM"], "num_query_groups": 2},
        as_codeshell,
    ),
    "refact": Released(
        "llama",
        {"intermediate_size": 256, "num_key_value_heads": 1},
        OF_GPT | {"architectures": ["GPTRefactForCausalLM"]},
        as_refact,
    ),
}
"""Architecture -> what its folders are."""


def write_released(folder: Path, name: str) -> None:
    """Write the folder of an architecture."""
    own = READ_ONLY[name]
    write(folder, own.base, **SHAPE | own.facts)
    rewrite(folder, own.change)
    edit_config(folder, **own.fields)
