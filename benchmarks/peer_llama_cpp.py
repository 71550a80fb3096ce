"""llama.cpp as a measured process, driven through llama-cpp-python's low-level calls in an environment of its own.

python peer_llama_cpp.py make CONFIG.json FORMAT OUT.gguf     random weights of a shape, FORMAT bf16, q8_0 or q4_0
python peer_llama_cpp.py run OUT.gguf THREADS                 the protocol of peers.py
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

MAX_SEQUENCES = 32
CONTEXT = 512
FORMATS = ("bf16", "q8_0", "q4_0")


def random_rows(kind: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
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


def make(config_path: str, kind: str, path: str) -> None:
    """Write a GGUF file. With q4_0 the tied embedding and head are q8_0, as quire keeps its head at 8 bits."""
    import gguf

    c = json.loads(Path(config_path).read_text())
    arch = c["model_type"]
    w = gguf.GGUFWriter(path, arch)
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
    w.add_tokenizer_model("no_vocab")
    types = {"bf16": gguf.GGMLQuantizationType.BF16, "q8_0": gguf.GGMLQuantizationType.Q8_0,
             "q4_0": gguf.GGMLQuantizationType.Q4_0}  # fmt: skip
    rng = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int, fmt: str) -> None:
        w.add_tensor(name, random_rows(fmt, rows, columns, rng), raw_dtype=types[fmt])

    hidden, wide, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    matrix("token_embd.weight", c["vocab_size"], hidden, "q8_0" if kind == "q4_0" else kind)
    w.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for i in range(c["num_hidden_layers"]):
        for name, rows, columns in (("attn_q", q, hidden), ("attn_k", kv, hidden), ("attn_v", kv, hidden),
                                    ("attn_output", hidden, q), ("ffn_gate", wide, hidden), ("ffn_up", wide, hidden),
                                    ("ffn_down", hidden, wide)):  # fmt: skip
            matrix(f"blk.{i}.{name}.weight", rows, columns, kind)
        for name in ("attn_norm", "ffn_norm"):
            w.add_tensor(f"blk.{i}.{name}.weight", np.ones(hidden, np.float32))
        if arch == "qwen3":
            for name in ("attn_q_norm", "attn_k_norm"):
                w.add_tensor(f"blk.{i}.{name}.weight", np.ones(d, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


class Peer:
    """A context with room for MAX_SEQUENCES sequences."""

    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp

        self.lib = llama_cpp
        llama_cpp.llama_backend_init()
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = MAX_SEQUENCES * CONTEXT
        options.n_batch = options.n_ubatch = 512
        options.n_seq_max = MAX_SEQUENCES
        options.n_threads = options.n_threads_batch = threads
        options.no_perf = True
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        if not self.context:
            raise RuntimeError("llama.cpp gave no context")
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)

    def step(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """One llama_decode over (token, position, sequence, wants logits) rows."""
        self.batch.n_tokens = len(rows)
        for i, (token, position, sequence, logits) in enumerate(rows):
            self.batch.token[i], self.batch.pos[i] = token, position
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, sequence
            self.batch.logits[i] = logits
        code = self.lib.llama_decode(self.context, self.batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        self.lib.llama_synchronize(self.context)

    def clear(self) -> None:
        """Forget all sequences."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), False)

    def prefill(self, tokens: int) -> float:
        """Tokens/s of one prompt in one batch."""
        self.clear()
        started = time.perf_counter()
        self.step([(i * 7919 % 31990 + 5, i, 0, i == tokens - 1) for i in range(tokens)])
        return tokens / (time.perf_counter() - started)

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Tokens/s of `batch` sequences together, each after `context` tokens."""
        self.clear()
        for s in range(batch):
            self.step([((i * 7919 + s) % 31990 + 5, i, s, i == context - 1) for i in range(context)])
        started = time.perf_counter()
        for t in range(steps):
            self.step([((t * 31 + s) % 31990 + 5, context + t, s, True) for s in range(batch)])
        return batch * steps / (time.perf_counter() - started)


def main() -> None:
    """Make a file, or load one and obey."""
    if sys.argv[1] == "make":
        make(*sys.argv[2:5])
        return
    peer = Peer(sys.argv[2], int(sys.argv[3]))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        rate = getattr(peer, command.pop("do"))(**command)
        print(json.dumps({"rate": rate}), flush=True)


if __name__ == "__main__":
    main()
