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


def write_eagle(folder: Path, method: str, hidden: int, vocab: int, known: int = 0, **config: Any) -> Path:
    """The layer of EAGLE ("eagle", with the bias of its authors' fc) or of EAGLE-3, which knows `known` tokens."""
    g = torch.Generator().manual_seed(vocab + known)
    heads, head_dim, inner = 4, hidden // 4, hidden + 32

    def normal(n: int, k: int) -> Tensor:
        return torch.randn(n, k, generator=g) * k**-0.5

    base, width = ("midlayer", 2 * hidden) if method == "eagle3" else ("layers.0", hidden)
    tensors = {
        f"{base}.self_attn.q_proj.weight": normal(heads * head_dim, width),
        f"{base}.self_attn.k_proj.weight": normal(2 * head_dim, width),
        f"{base}.self_attn.v_proj.weight": normal(2 * head_dim, width),
        f"{base}.self_attn.o_proj.weight": normal(hidden, heads * head_dim),
        f"{base}.mlp.gate_proj.weight": normal(inner, hidden),
        f"{base}.mlp.up_proj.weight": normal(inner, hidden),
        f"{base}.mlp.down_proj.weight": normal(hidden, inner),
        f"{base}.post_attention_layernorm.weight": 1 + normal(1, hidden)[0],
        "fc.weight": normal(hidden, (3 if method == "eagle3" else 2) * hidden),
    }
    facts: dict[str, Any] = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 1,
        "num_attention_heads": heads, "num_key_value_heads": 2, "vocab_size": vocab, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu", "max_position_embeddings": 1024, "tie_word_embeddings": False,
    }  # fmt: skip
    if method == "eagle":
        tensors |= {"fc.bias": normal(1, hidden)[0], "embed_tokens.weight": normal(vocab, hidden)}
        return saved(folder, facts | config, tensors)
    tensors |= {
        "midlayer.hidden_norm.weight": 1 + normal(1, hidden)[0],
        "midlayer.input_layernorm.weight": 1 + normal(1, hidden)[0],
        "norm.weight": 1 + normal(1, hidden)[0],
        "lm_head.weight": normal(known or vocab, hidden),
    }
    if known:
        ids = torch.randperm(vocab, generator=g)[:known].sort().values
        t2d = torch.zeros(vocab, dtype=torch.bool)
        t2d[ids] = True
        tensors |= {"d2t": ids - torch.arange(known), "t2d": t2d}
        facts["draft_vocab_size"] = known
    return saved(folder, facts | {"architectures": ["LlamaForCausalLMEagle3"]} | config, tensors)


def write_dflash(folder: Path, hidden: int, vocab: int, layers: tuple[int, ...], **config: Any) -> Path:
    """Two layers that draft blocks, which read the target's `layers`, as the method's authors publish them."""
    g = torch.Generator().manual_seed(vocab)
    heads, head_dim, inner = 4, hidden // 4, hidden + 32

    def normal(n: int, k: int) -> Tensor:
        return torch.randn(n, k, generator=g) * k**-0.5

    tensors = {
        "fc.weight": normal(hidden, len(layers) * hidden),
        "hidden_norm.weight": 1 + normal(1, hidden)[0],
        "norm.weight": 1 + normal(1, hidden)[0],
    }
    for i in range(2):
        at = f"layers.{i}"
        tensors |= {
            f"{at}.self_attn.q_proj.weight": normal(heads * head_dim, hidden),
            f"{at}.self_attn.k_proj.weight": normal(2 * head_dim, hidden),
            f"{at}.self_attn.v_proj.weight": normal(2 * head_dim, hidden),
            f"{at}.self_attn.o_proj.weight": normal(hidden, heads * head_dim),
            f"{at}.self_attn.q_norm.weight": 1 + normal(1, head_dim)[0],
            f"{at}.self_attn.k_norm.weight": 1 + normal(1, head_dim)[0],
            f"{at}.mlp.gate_proj.weight": normal(inner, hidden),
            f"{at}.mlp.up_proj.weight": normal(inner, hidden),
            f"{at}.mlp.down_proj.weight": normal(hidden, inner),
            f"{at}.input_layernorm.weight": 1 + normal(1, hidden)[0],
            f"{at}.post_attention_layernorm.weight": 1 + normal(1, hidden)[0],
        }
    facts: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": 2, "head_dim": head_dim,
        "vocab_size": vocab, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "block_size": 8,
        "max_position_embeddings": 1024, "tie_word_embeddings": False,
        "dflash_config": {"mask_token_id": vocab - 1, "target_layer_ids": list(layers)},
    }  # fmt: skip
    return saved(folder, facts | config, tensors)
