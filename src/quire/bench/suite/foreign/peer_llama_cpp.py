"""llama.cpp as a measured process, driven through llama-cpp-python's low-level calls in an environment of its own.

python peer_llama_cpp.py MODEL.gguf THREADS [SEQUENCES [CONTEXT [CACHE]]]   the protocol, and `logits` of its answers
python peer_llama_cpp.py first MODEL.gguf THREADS               load, compute a token, say so
python peer_llama_cpp.py quantize IN.gguf OUT.gguf FORMAT      by llama.cpp's own rules; FORMAT is a key of FORMATS
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

import llama_cpp
import numpy as np
from protocol import Item, run_load, serve

CONTEXT = ROWS = 512
PROMPT = (5, 6, 7)
FORMATS = {
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q8_0": 7,
    "q5_0": 8,
    "q5_1": 9,
    "q2_k": 10,
    "q3_k_s": 11,
    "q3_k_m": 12,
    "q3_k_l": 13,
    "q4_k_s": 14,
    "q4_k_m": 15,
    "q5_k_s": 16,
    "q5_k_m": 17,
    "q6_k": 18,
    "iq4_nl": 25,
    "iq3_s": 26,
    "iq4_xs": 30,
    "bf16": 32,
    "mxfp4": 7,
    "nvfp4": 7,
}  # enum llama_ftype
"""Format -> what all matrices get by llama.cpp's rules, except for those of `LAYERS`."""
LAYERS = {"mxfp4": 39, "nvfp4": 40}  # enum ggml_type
"""Format -> type of the matrices of the layers, for formats that its rules give to experts alone."""
CACHES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}  # enum ggml_type
"""Types of keys and values, as -ctk and -ctv of its server name them."""
SILENT = llama_cpp.llama_log_callback(lambda level, text, data: None)


class RunningRequest:
    """A request that runs: its sequence, tokens of the prompt, how many are to follow; what is computed, and came."""

    def __init__(self, sequence: int, prompt: list[int], output: int) -> None:
        self.sequence, self.prompt, self.output = sequence, prompt, output
        self.computed, self.made, self.last = 0, 0, 0


class LlamaCppPeer:
    """A context with room for `sequences` sequences of `context` tokens; all else as llama.cpp has it by default.

    Its library has no scheduler. `load` batches as its server does: tokens of all that run, then of prompts, 512 rows
    at most, and a sequence that is done leaves its place to the next.
    """

    def __init__(
        self, path: str, threads: int, sequences: int = 32, context: int = CONTEXT, cache: str = "f16"
    ) -> None:
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(SILENT, ctypes.c_void_p(0))
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = sequences * context
        options.n_batch = options.n_ubatch = 512
        options.n_seq_max = sequences
        options.n_threads = options.n_threads_batch = threads
        options.type_k = options.type_v = CACHES[cache]
        options.no_perf = True
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        if not self.context:
            raise RuntimeError("llama.cpp gave no context")
        self.batch = llama_cpp.llama_batch_init(ROWS, 0, 1)
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.width = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.free = list(range(sequences))
        self.waiting: list[tuple[int, list[int], int]] = []
        self.running: dict[int, RunningRequest] = {}

    def facts(self) -> dict[str, str]:
        """What runs: the version, and the processor features that the library was built for and found."""
        info = llama_cpp.llama_print_system_info().decode()
        return {"version": f"llama-cpp-python {llama_cpp.__version__}", "cpu": info.strip()}

    def compute(self, rows: list[tuple[int, int, int, bool]]) -> None:
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
        self.compute([(i * 7919 % 31990 + 5, i, 0, i == tokens - 1) for i in range(tokens)])
        return tokens / (time.perf_counter() - started)

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Tokens/s of `batch` sequences together, each after `context` tokens."""
        self.clear()
        for s in range(batch):
            self.compute([((i * 7919 + s) % 31990 + 5, i, s, i == context - 1) for i in range(context)])
        started = time.perf_counter()
        for t in range(steps):
            self.compute([((t * 31 + s) % 31990 + 5, context + t, s, True) for s in range(batch)])
        return batch * steps / (time.perf_counter() - started)

    def logits(self, tokens: list[int], out: str) -> float:
        """Write the logits f32 [len(tokens), vocabulary] after every token; tokens/s."""
        self.clear()
        found, spent = np.empty((len(tokens), self.width), np.float32), 0.0
        for at in range(0, len(tokens), ROWS):
            part = tokens[at : at + ROWS]
            started = time.perf_counter()
            self.compute([(token, i, 0, True) for i, token in enumerate(part, at)])
            spent += time.perf_counter() - started
            values = llama_cpp.llama_get_logits(self.context)
            found[at : at + ROWS] = np.ctypeslib.as_array(values, (len(part), self.width))
        np.save(out, found)
        return len(tokens) / spent

    def load(self, items: list[list[Any]], most: int) -> dict[str, Any]:
        """See `protocol.run_load`."""
        self.clear()
        found: dict[str, Any] = run_load(self, [Item(*item) for item in items], most)
        return found

    def submit(self, number: int, prompt: list[int], output: int) -> None:
        """Queue a request."""
        self.waiting.append((number, prompt, output))

    def step(self) -> list[tuple[int, int, bool]]:
        """One batch of all that run; the greedy token of each whose prompt is computed."""
        while self.waiting and self.free:
            number, prompt, output = self.waiting.pop(0)
            self.running[number] = RunningRequest(self.free.pop(), prompt, output)
        rows: list[tuple[int, int, int, bool]] = []
        ready: list[tuple[int, int]] = []
        for number, asked in sorted(self.running.items(), key=lambda pair: not pair[1].made):
            tokens = [asked.last] if asked.made else asked.prompt[asked.computed :][: ROWS - len(rows)]
            end = asked.computed + len(tokens)
            wanted = bool(asked.made) or end == len(asked.prompt)
            for place, token in enumerate(tokens, asked.computed):
                rows.append((token, place, asked.sequence, wanted and place == end - 1))
            if wanted and tokens:
                ready.append((number, len(rows) - 1))
            asked.computed = end
        self.compute(rows)
        return [self._take(number, row) for number, row in ready]

    def _take(self, number: int, row: int) -> tuple[int, int, bool]:
        """Take the next token of a request, from the logits of a row of the batch."""
        asked = self.running[number]
        values = llama_cpp.llama_get_logits_ith(self.context, row)
        asked.last, asked.made = int(np.ctypeslib.as_array(values, (self.width,)).argmax()), asked.made + 1
        done = asked.made >= asked.output
        if done:
            del self.running[number]
            self.free.append(asked.sequence)
            llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.context), asked.sequence, -1, -1)
        return number, 1, done


def quantize(source: str, out: str, fmt: str) -> None:
    """`llama-quantize` as a call. Raises RuntimeError when it fails."""
    llama_cpp.llama_log_set(SILENT, ctypes.c_void_p(0))
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = FORMATS[fmt]
    options.nthread = 2
    if fmt in LAYERS:
        kinds = [(b"blk.*weight", LAYERS[fmt]), (None, 0)]
        options.tt_overrides = (llama_cpp.llama_model_tensor_override * len(kinds))(*kinds)
    code = llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(options))
    if code:
        raise RuntimeError(f"llama_model_quantize returned {code}")


def first(path: str, threads: str) -> None:
    """The first token after a made-up word (the vocabulary is made up too), and what took how long."""
    began = time.perf_counter()
    peer = LlamaCppPeer(path, int(threads), 1)
    loaded = time.perf_counter()
    peer.compute([(token, i, 0, token == PROMPT[-1]) for i, token in enumerate(PROMPT)])
    np.ctypeslib.as_array(llama_cpp.llama_get_logits(peer.context), (1, peer.width)).argmax()
    print(json.dumps({"load": loaded - began, "first token": time.perf_counter() - loaded}), flush=True)


def main() -> None:
    """Quantize a file, or load one and obey."""
    if sys.argv[1] == "first":
        first(*sys.argv[2:4])
        return
    if sys.argv[1] == "quantize":
        quantize(*sys.argv[2:5])
        return
    path, threads, *given = sys.argv[1:]
    sequences, context, cache = given + ["32", str(CONTEXT), "f16"][len(given) :]
    serve(LlamaCppPeer(path, int(threads), int(sequences), int(context), cache))


if __name__ == "__main__":
    main()
