"""Tensors packed and ordered as relatives of a family store them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]


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
