"""Folders of heads with random numbers, in the layouts that are public, for any target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def saved(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write config.json and model.safetensors; numbers in bf16, so that every backend has the same."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {k: (t.bfloat16() if t.is_floating_point() else t).contiguous() for k, t in tensors.items()},
        str(folder / "model.safetensors"),
    )
    return folder


def write_medusa(folder: Path, hidden: int, vocab: int, heads: int = 3, blocks: int = 1, own: bool = True) -> Path:
    """Medusa heads as their authors publish them, or with `own` False as vLLM keeps them, for half of the tokens."""
    g = torch.Generator().manual_seed(heads)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g) * hidden**-0.5

    tensors: dict[str, Tensor] = {}
    if own:
        for i in range(heads):
            for j in range(blocks):
                tensors |= {f"{i}.{j}.linear.weight": normal(hidden, hidden), f"{i}.{j}.linear.bias": normal(hidden)}
            tensors[f"{i}.{blocks}.weight"] = normal(vocab, hidden)
        config: dict[str, Any] = {"medusa_num_heads": heads, "medusa_num_layers": blocks}
        return saved(folder, config, tensors)
    for i in range(heads):
        for j in range(blocks):
            tensors[f"medusa_heads.blocks.{i}.layers.{j}.weight"] = normal(hidden, hidden)
        tensors[f"medusa_heads.lm_heads.{i}.weight"] = normal(vocab if i % 2 else vocab // 2, hidden)
    tensors["token_map"] = torch.randperm(vocab, generator=g)[: vocab // 2].sort().values
    config = {
        "model_type": "medusa",
        "num_heads": heads,
        "num_hidden_layers": blocks,
        "hidden_size": hidden,
        "vocab_size": vocab,
        "truncated_vocab_size": vocab // 2,
    }
    return saved(folder, config, tensors)
