"""llama.cpp as a measured process, driven through llama-cpp-python's low-level calls in an environment of its own.

python peer_llama_cpp.py MODEL.gguf THREADS [SEQUENCES]        the protocol of peers.py, and `logits` of quality.py
python peer_llama_cpp.py first MODEL.gguf THREADS               load, compute a token, say so: for starts.py
python peer_llama_cpp.py quantize IN.gguf OUT.gguf FORMAT      by llama.cpp's own rules; FORMAT is a key of FORMATS
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

import llama_cpp
import numpy as np

CONTEXT = 512
PROMPT = (5, 6, 7)
FORMATS = {
    "q4_0": 2,
    "q8_0": 7,
    "q3_k_m": 12,
    "q4_k_m": 15,
    "q5_k_m": 17,
    "q6_k": 18,
    "iq4_xs": 30,
    "bf16": 32,
}  # enum llama_ftype
SILENT = llama_cpp.llama_log_callback(lambda level, text, data: None)


class Peer:
    """A context with room for `sequences` sequences of CONTEXT tokens; all else as llama.cpp has it by default."""

    def __init__(self, path: str, threads: int, sequences: int) -> None:
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(SILENT, ctypes.c_void_p(0))
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = sequences * CONTEXT
        options.n_batch = options.n_ubatch = 512
        options.n_seq_max = sequences
        options.n_threads = options.n_threads_batch = threads
        options.no_perf = True
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        if not self.context:
            raise RuntimeError("llama.cpp gave no context")
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)

    def facts(self) -> dict[str, str]:
        """What runs: the version, and the processor features that the library was built for and found."""
        info = llama_cpp.llama_print_system_info().decode()
        return {"version": f"llama-cpp-python {llama_cpp.__version__}", "cpu": info.strip()}

    def step(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """One llama_decode over (token, position, sequence, wants logits) rows."""
        self.batch.n_tokens = len(rows)
        for i, (token, position, sequence, logits) in enumerate(rows):
            self.batch.token[i], self.batch.pos[i] = token, position
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, sequence
            self.batch.logits[i] = logits
        code = llama_cpp.llama_decode(self.context, self.batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        llama_cpp.llama_synchronize(self.context)

    def clear(self) -> None:
        """Forget all sequences."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)

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

    def logits(self, tokens: list[int], out: str) -> float:
        """Write the logits f32 [len(tokens), vocabulary] after every token; tokens/s."""
        self.clear()
        started = time.perf_counter()
        self.step([(token, i, 0, True) for i, token in enumerate(tokens)])
        rate = len(tokens) / (time.perf_counter() - started)
        width = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        values = llama_cpp.llama_get_logits(self.context)
        np.save(out, np.ctypeslib.as_array(values, (len(tokens), width)))
        return rate


def quantize(source: str, out: str, fmt: str) -> None:
    """`llama-quantize` as a call. Raises RuntimeError when it fails."""
    llama_cpp.llama_log_set(SILENT, ctypes.c_void_p(0))
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = FORMATS[fmt]
    options.nthread = 2
    code = llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(options))
    if code:
        raise RuntimeError(f"llama_model_quantize returned {code}")


def first(path: str, threads: str) -> None:
    """The first token after a made-up word (the vocabulary is made up too), and what took how long."""
    began = time.perf_counter()
    peer = Peer(path, int(threads), 1)
    loaded = time.perf_counter()
    peer.step([(token, i, 0, token == PROMPT[-1]) for i, token in enumerate(PROMPT)])
    vocabulary = llama_cpp.llama_model_get_vocab(peer.model)
    width = llama_cpp.llama_vocab_n_tokens(vocabulary)
    np.ctypeslib.as_array(llama_cpp.llama_get_logits(peer.context), (1, width)).argmax()
    print(json.dumps({"load": loaded - began, "first token": time.perf_counter() - loaded}), flush=True)


def main() -> None:
    """Quantize a file, or load one and obey."""
    if sys.argv[1] == "first":
        first(*sys.argv[2:4])
        return
    if sys.argv[1] == "quantize":
        quantize(*sys.argv[2:5])
        return
    peer = Peer(sys.argv[1], int(sys.argv[2]), int((*sys.argv, 32)[3]))
    print(json.dumps({"ready": True} | peer.facts()), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        rate = getattr(peer, command.pop("do"))(**command)
        print(json.dumps({"rate": rate}), flush=True)


if __name__ == "__main__":
    main()
