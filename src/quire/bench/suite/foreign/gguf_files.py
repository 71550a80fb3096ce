"""GGUF files for llama.cpp, written in its own environment.

    python gguf_files.py random CONFIG.json FORMAT OUT.gguf     random weights of a shape; FORMAT bf16, q8_0 or q4_0
    python gguf_files.py convert FOLDER OUT.gguf                the float32 safetensors of a checkpoint as they are

Both carry the made-up vocabulary of shapes.py, so that llama.cpp's server can turn tokens into text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from shapes import HEAD_NORMS, MATRICES, NORMS, expert_shapes, shape_of, vocabulary

Matrix = np.ndarray[Any, Any]
TYPES = {
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}


def begin(path: str, c: dict[str, Any]) -> gguf.GGUFWriter:
    """A writer that has the facts and the vocabulary of a config."""
    w = gguf.GGUFWriter(path, c["model_type"].replace("_", ""))
    w.add_block_count(c["num_hidden_layers"])
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_key_length(c["head_dim"])
    w.add_value_length(c["head_dim"])
    w.add_rope_dimension_count(c["head_dim"])
    w.add_rope_freq_base(c["rope_theta"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_vocab_size(c["vocab_size"])
    if "num_experts" in c:
        w.add_expert_count(c["num_experts"])
        w.add_expert_used_count(c["num_experts_per_tok"])
        w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    add_vocabulary(w, c["vocab_size"])
    return w


def add_vocabulary(w: gguf.GGUFWriter, size: int) -> None:
    """Write the made-up vocabulary and its special tokens."""
    pieces = vocabulary(size)
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, gguf.TokenType.BYTE]
    w.add_tokenizer_model("llama")
    w.add_tokenizer_pre("default")
    w.add_token_list(pieces)
    w.add_token_scores([0.0] * len(pieces))
    w.add_token_types([*kinds, *[gguf.TokenType.NORMAL] * (len(pieces) - len(kinds))])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)
    w.add_add_bos_token(False)


def finish(w: gguf.GGUFWriter) -> None:
    """Write what was added."""
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def random_rows(kind: str, rows: int, columns: int, rng: np.random.Generator) -> Matrix:
    """Rows of raw blocks: weights of about 0.02."""
    if kind == "bf16":
        values = (rng.standard_normal((rows, columns), np.float32) * 0.02).view(np.uint32) >> 16
        return values.astype(np.uint16).view(np.uint8).reshape(rows, columns * 2)
    blocks = columns // 32
    size = {"q8_0": 32, "q4_0": 16}[kind]
    out = np.empty((rows, blocks, 2 + size), np.uint8)
    scale = np.float16(0.02 / {"q8_0": 73.0, "q4_0": 4.6}[kind])
    out[:, :, :2] = np.frombuffer(scale.tobytes(), np.uint8)
    out[:, :, 2:] = rng.integers(0, 256, (rows, blocks, size), np.uint8)
    return out.reshape(rows, -1)


def random(config: str, kind: str, path: str) -> None:
    """Random weights. With q4_0 the tied embedding and head are q8_0, as quire keeps its head at 8 bits."""
    c = json.loads(Path(config).read_text())
    w, rng = begin(path, c), np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int, fmt: str) -> None:
        w.add_tensor(name, random_rows(fmt, rows, columns, rng), raw_dtype=TYPES[fmt])

    def experts(layer: str) -> None:
        router = rng.standard_normal((c["num_experts"], c["hidden_size"]), np.float32) * 0.02
        w.add_tensor(f"{layer}.ffn_gate_inp.weight", router)
        for name, (count, rows, columns) in expert_shapes(c).items():
            one = [random_rows(kind, rows, columns, rng) for _ in range(count)]
            w.add_tensor(f"{layer}.{name}.weight", np.stack(one), raw_dtype=TYPES[kind])

    hidden = c["hidden_size"]
    matrix("token_embd.weight", c["vocab_size"], hidden, "q8_0" if kind == "q4_0" else kind)
    w.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for i in range(c["num_hidden_layers"]):
        for name in MATRICES:
            if "num_experts" not in c or not name.startswith("ffn_"):
                rows, columns = shape_of(name, c)
                matrix(f"blk.{i}.{name}.weight", rows, columns, kind)
        if "num_experts" in c:
            experts(f"blk.{i}")
        for name in NORMS:
            w.add_tensor(f"blk.{i}.{name}.weight", np.ones(hidden, np.float32))
        for name in HEAD_NORMS if c["model_type"].startswith("qwen3") else ():
            w.add_tensor(f"blk.{i}.{name}.weight", np.ones(c["head_dim"], np.float32))
    finish(w)


def interleaved(matrix: Matrix, heads: int) -> Matrix:
    """Rows of q or k in the order of llama.cpp's rope for Llama: pairs side by side instead of half a head apart."""
    return matrix.reshape(heads, 2, -1, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)


def convert(folder: str, path: str) -> None:
    """A Llama checkpoint's weights as they are."""
    from safetensors.numpy import load_file

    c = json.loads((Path(folder) / "config.json").read_text())
    raw = load_file(Path(folder) / "model.safetensors")
    w = begin(path, c)
    w.add_tensor("token_embd.weight", raw["model.embed_tokens.weight"])
    w.add_tensor("output_norm.weight", raw["model.norm.weight"])
    if "lm_head.weight" in raw and not c["tie_word_embeddings"]:
        w.add_tensor("output.weight", raw["lm_head.weight"])
    heads = {"attn_q": c["num_attention_heads"], "attn_k": c["num_key_value_heads"]}
    for i in range(c["num_hidden_layers"]):
        for ours, theirs in (MATRICES | NORMS).items():
            tensor = raw[f"model.layers.{i}.{theirs}.weight"]
            w.add_tensor(f"blk.{i}.{ours}.weight", interleaved(tensor, heads[ours]) if ours in heads else tensor)
    finish(w)


if __name__ == "__main__":
    made: dict[str, Callable[..., None]] = {"random": random, "convert": convert}
    made[sys.argv[1]](*sys.argv[2:])
