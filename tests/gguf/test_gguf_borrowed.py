"""Architectures of models that are another family's: files of that family under their name answer as it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

gguf = pytest.importorskip("gguf", reason="the gguf package reads the written tensors; it is in the dev extra")

from family_tensors import packed_qkv, rewrite  # noqa: E402
from gguf_models import permuted  # noqa: E402
from gguf_writing import SHAPE, add_tokenizer, byte_level  # noqa: E402
from oracle import backend, edit_config, logits, relative_error, write  # noqa: E402
from paged_model import Paged, prompt  # noqa: E402
from quire.compress.layouts.gguf import write_gguf  # noqa: E402
from quire.core.config import flat_config  # noqa: E402
from quire.gguf.file import GgufFile  # noqa: E402
from quire.gguf.writer import NewTensor, write_file  # noqa: E402
from quire.model.build import load_model  # noqa: E402
from quire.model.disk.gguf_dense import READ  # noqa: E402

TOKENS = prompt(19, 1)
Tensors = dict[str, np.ndarray[Any, Any]]
SECTIONS = {"rope.dimension_sections": np.array([3, 3, 2, 0], np.int32)}


def in_halves(tensors: Tensors) -> Tensors:
    """Queries and keys in two halves, whose pairs take turns in the file."""
    heads = {"attn_q.": 4, "attn_k.": 2}
    out = {}
    for name, tensor in tensors.items():
        count = next((n for part, n in heads.items() if part in name), 0)
        order = permuted(torch.arange(len(tensor)), count).numpy() if count else np.arange(len(tensor))
        back = np.empty_like(tensor)
        back[order] = tensor
        out[name] = back
    return out


def fused(tensors: Tensors) -> Tensors:
    """Queries, keys and values in one matrix."""
    out = {name: t for name, t in tensors.items() if not any(f"attn_{part}." in name for part in "qkv")}
    for name in tensors:
        if "attn_q." in name:
            parts = [tensors[name.replace("attn_q.", f"attn_{part}.")] for part in "qkv"]
            out[name.replace("attn_q.", "attn_qkv.")] = np.concatenate(parts)
    return out


def experts_fused(tensors: Tensors) -> Tensors:
    """Gate and up of all experts in one tensor."""
    out = {name: t for name, t in tensors.items() if "ffn_gate_exps" not in name and "ffn_up_exps" not in name}
    for name in tensors:
        if "ffn_gate_exps" in name:
            parts = tensors[name], tensors[name.replace("ffn_gate_exps", "ffn_up_exps")]
            out[name.replace("ffn_gate_exps", "ffn_gate_up_exps")] = np.concatenate(parts, 1)
    return out


def same(tensors: Tensors) -> Tensors:
    return tensors


MULTIPLIERS = {"residual_multiplier": 1.4 / 3**0.5, "embedding_multiplier": 12.0, "logits_scaling": 64 / 256,
               "attention_multiplier": 0.25}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 24,
           "norm_topk_prob": True}  # fmt: skip
DEEP = SECTIONS | {"n_deepstack_layers": 3}
CASES: dict[str, tuple[str, dict[str, Any], Callable[[Tensors], Tensors], Mapping[str, Any]]] = {
    "xverse": ("llama", {}, same, {}),
    "mistral3": ("llama", {"head_dim": 24}, same, {}),
    "exaone": ("llama", {}, in_halves, {}),
    "pangu-embedded": ("llama", {"attention_bias": True}, in_halves, {}),
    "qwen2vl": ("qwen2", {}, same, SECTIONS),
    "qwen3vl": ("qwen3", {"head_dim": 24}, same, DEEP),
    "qwen3vlmoe": ("qwen3_moe", EXPERTS, same, DEEP),
    "paddleocr": ("ernie4_5", {"head_dim": 16}, in_halves, SECTIONS),
    "hunyuan_vl": ("hunyuan_v1_dense", {"head_dim": 24}, same, SECTIONS),
    "minicpm": ("granite", MULTIPLIERS, same, {"attention.scale": None}),
    "minicpm older": ("granite", MULTIPLIERS, same, dict.fromkeys((
        "attention.scale", "embedding_scale", "residual_scale", "logit_scale"))),
    "llama fused": ("llama", {"attention_bias": True}, fused, {}),
    "qwen3moe fused": ("qwen3_moe", EXPERTS, experts_fused, {}),
    "codeshell": ("starcoder2", {"sliding_window": None}, fused, {}),
}  # fmt: skip
"""Architecture -> family and facts, what becomes of its tensors, and of keys (None: it is not there)."""


def renamed(path: Path, arch: str, change: Callable[[Tensors], Tensors], keys: Mapping[str, Any]) -> Path:
    """The file's model as one of `arch`."""
    file = GgufFile(path)
    was = file.metadata["general.architecture"]
    listed = {"tokenizer.ggml.tokens", "tokenizer.ggml.merges"}
    own = {key: list(value) if key in listed else value for key, value in file.metadata.items()}
    found = {key.replace(f"{was}.", f"{arch}.", 1): value for key, value in own.items()}
    found |= {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in keys.items()}
    tensors = change({t.name: np.array(t.data) for t in gguf.GGUFReader(path).tensors})
    infos = [NewTensor(name, "F32", t.shape) for name, t in tensors.items()]
    out = path.with_name(f"{arch}.gguf")
    write_file(out, {key: value for key, value in found.items() if value is not None}, infos, tensors.values())
    return out


def whole(path: Path) -> Tensor:
    model = load_model(flat_config(model=str(path), dtype="float32"), backend("reference"))
    return Paged(model, [TOKENS]).run([[len(TOKENS)]])[0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_files_under_another_name(name: str, tmp_path: Path) -> None:
    kind, facts, change, keys = CASES[name]
    oracle = write(tmp_path, kind, **SHAPE | facts)
    add_tokenizer(tmp_path, byte_level())
    write_gguf(tmp_path, tmp_path / "model.gguf", "F32")
    path = renamed(tmp_path / "model.gguf", name.split()[0], change, keys)
    assert relative_error(whole(path), logits(oracle, TOKENS)) <= 1e-5


@pytest.mark.parametrize(("arch", "layers"), [("refact", 3), ("baichuan", 40)])
def test_alibi(arch: str, layers: int, tmp_path: Path) -> None:
    """No key says that Baichuan's larger size and Refact have slopes."""
    write(tmp_path, "llama", **SHAPE | {"num_key_value_heads": 4, "num_hidden_layers": layers, "hidden_size": 64})
    add_tokenizer(tmp_path, byte_level())
    if arch == "refact":
        write_gguf(tmp_path, tmp_path / "model.gguf", "F32")

    def unturned(tensors: Tensors) -> Tensors:
        wide = {name.replace("attn_k.", "attn_q."): name for name in tensors if "attn_k." in name}
        keys = in_halves({q: tensors[k] for q, k in wide.items()})
        return in_halves(tensors) | {wide[q]: t for q, t in keys.items()}

    rewrite(tmp_path, packed_qkv)
    edit_config(tmp_path, model_type="baichuan", model_max_length=128,
                remove=("max_position_embeddings", "rope_parameters"))  # fmt: skip
    if arch == "refact":
        path = renamed(tmp_path / "model.gguf", arch, unturned, {})
    else:
        path = tmp_path / "model.gguf"
        write_gguf(tmp_path, path, "F32")
    assert relative_error(whole(path), whole(tmp_path)) <= 1e-5


def test_every_borrowed_architecture_is_tried() -> None:
    assert set(READ) <= {name.split()[0] for name in CASES} | {"refact", "muse-glimmer"}
