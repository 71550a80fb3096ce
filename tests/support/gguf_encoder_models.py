"""Tiny encoders for GGUF files, and their folders as llama.cpp's converter wants them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from encoder_models import write_encoder
from family_tensors import rewrite
from oracle import edit_config

MADE = {
    "jina-bert-v2": ("bert", {"position_embedding_type": "alibi"}),
    "nomic-bert-moe": (
        "nomic_bert",
        {"moe_every_n_layers": 2, "num_experts": 4, "moe_top_k": 2, "activation_function": "gelu"},
    ),
}
"""The same of models that transformers has not: what is in the folder of its relative, and what its config says."""
GEMMA = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
CONVERTED: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "roberta": ("roberta", {}),
    "xlm-roberta": ("xlm-roberta", {}),
    "distilbert": ("distilbert", {}),
    "modern-bert": ("modernbert", {}),
    "nomic-bert": ("nomic_bert", {}),
    "eurobert": ("eurobert", {}),
    "gemma-embedding": ("gemma3_text", {"num_hidden_layers": 7, "layer_types": GEMMA, "query_pre_attn_scalar": 16}),
    "jina-bert-v3": ("jina_embeddings_v3", {}),
}
"""Name -> the model of `encoder_models`, and what its config says beside."""


def write_model(folder: Path, name: str, ends: str = "Model", **more: Any) -> None:
    """Save the model `name`; `ends`: how its class does."""
    kind, facts = (CONVERTED | MADE)[name]
    write_encoder(folder, kind, ends, **(more if name in MADE else facts | more))
    if name in MADE:
        edit_config(folder, **facts)
        rewrite(folder, jina_2 if name == "jina-bert-v2" else experts)


Tensors = dict[str, torch.Tensor]


def jina_2(tensors: Tensors) -> Tensors:
    """A BERT's tensors as Jina 2 has them."""
    called = {"intermediate.dense.weight": "mlp.gated_layers.weight", "output.dense": "mlp.wo",
              "output.LayerNorm": "mlp.layernorm"}  # fmt: skip
    found = {}
    for name, tensor in tensors.items():
        if "position_embeddings" in name or "intermediate.dense.bias" in name:
            continue
        if "attention" not in name and "layer." in name:
            for old, new in called.items():
                name = name.replace(old, new)
        if "gated_layers" in name:
            tensor = torch.cat((tensor, tensor.flip(0)))
        found[name] = tensor
    return found


def experts(tensors: Tensors) -> Tensors:
    """A Nomic BERT's tensors with biases, and with four experts in every second layer."""
    found = {}
    for name, tensor in tensors.items():
        layer = int(re.findall(r"layers\.(\d+)", name)[0]) if "layers." in name else 0
        if "fc1" in name or "fc2" in name:
            if "fc12" in name:
                continue
            if layer % 2 == 0:
                name = name.replace("fc11", "fc1")
            else:
                turned = tensor if "fc11" in name else tensor.T
                found[re.sub(r"fc\d+", f"experts.mlp.w{1 if 'fc11' in name else 2}", name).removesuffix(".weight")] = (
                    torch.cat([turned.roll(i, 0) for i in range(4)])
                )
                found[re.sub(r"fc\d+", "router.layer", name)] = torch.randn(4, turned.shape[1])
                continue
        found[name] = tensor
        if any(part in name for part in ("Wqkv", "out_proj", "fc1", "fc2")):
            found[name.replace("weight", "bias")] = torch.randn(len(tensor)) * 0.3
    return found


def write_dense(folder: Path, *widths: int, mode: str = "mean") -> None:
    """Add a pooling of sentence-transformers, and dense layers behind it, from each width to the next."""
    dense = [(f"{i}_Dense", "Dense") for i in range(2, len(widths) + 1)]
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), *dense, ("9_Normalize", "Normalize")]
    said = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules]
    (folder / "modules.json").write_text(json.dumps(said))
    torch.manual_seed(5)
    for i, (path, kind) in enumerate(modules[1:-1]):
        (folder / path).mkdir()
        if kind == "Pooling":
            (folder / path / "config.json").write_text(json.dumps({"pooling_mode": mode}))
            continue
        n, k = widths[i], widths[i - 1]
        facts = {"in_features": k, "out_features": n, "bias": False, "activation_function": "torch.nn.Identity"}
        (folder / path / "config.json").write_text(json.dumps(facts))
        save_file({"linear.weight": torch.randn(n, k) / k**0.5}, folder / path / "model.safetensors")


NOMIC = {"activation_function": "swiglu", "n_positions": 8192, "causal": False, "prenorm": False,
         **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), False), "rotary_emb_fraction": 1.0,
         "rotary_emb_interleaved": False, "rotary_emb_scale_base": None}  # fmt: skip
RELEASED: dict[str, dict[str, Any]] = {
    "jina-bert-v2": {"architectures": ["JinaBertModel"]},
    "llama-embed": {"architectures": ["LlamaBidirectionalModel"]},
    "nomic-bert-moe": NOMIC
    | {"activation_function": "gelu", "n_inner": 96, "n_embd": 64, "max_position_embeddings": 140}
    | dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), True),
    "modern-bert": {"layer_norm_eps": 1e-5},
    "nomic-bert": NOMIC,
    "eurobert": {"classifier_pooling": "mean"},
    "jina-bert-v3": {"architectures": ["XLMRobertaModel"], "lora_adaptations": ["retrieval.query"]},
}


def as_released(folder: Path, name: str) -> None:
    """Give the folder the config of releases where transformers' own differs, and a tokenizer to count."""
    edit_config(folder, (), **RELEASED.get(name, {}))
    count = json.loads((folder / "config.json").read_text())["vocab_size"]
    vocab = {"type": "WordPiece", "vocab": {str(i): i for i in range(count)}}
    (folder / "tokenizer.json").write_text(json.dumps({"model": vocab, "added_tokens": []}))
