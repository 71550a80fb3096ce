"""What llama.cpp makes of GGUF files: `tests/gguf/test_llama_cpp.py` runs it in the peer's environment.

    {"do": "quantize", "source": ..., "out": ..., "format": 7}
        by llama-quantize's own rules; the format is an enum llama_ftype
    {"do": "generate", "model": ..., "prompts": [[...]], "steps": n, "logits": FILE, "flash": false,
     "plain": false}
        greedy -> "tokens" [[...]]; the file gets f32 [prompts, steps, vocabulary]; an encoder reads the prompts.
        "flash": by flash attention, whose mask is f16. "plain": matrices stay as the file has them: the code for AMX
        has no products with permuted rows, which latent attention needs, and ends at an assertion
    {"do": "embed", "model": ..., "prompts": [[...]], "vectors": FILE, "causal": true}
        the file gets f32 [prompts, width]: the vector of each, or the logits of its classes, as the file says; mean
        where it does not. "causal": whether tokens see only those before them is what the file says, else they do not
    {"do": "tokenize", "model": ..., "texts": [...], "special": true}
        -> "ids" [[...]] and "texts", those ids back

Commands on standard input, an answer for each on standard output. Caches are f32 and one thread works.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import llama_cpp
import numpy as np

LINES: list[str] = []
KEPT = llama_cpp.llama_log_callback(lambda level, text, data: LINES.append(text.decode("utf-8", "replace")))
F32 = 0  # enum ggml_type


def load(path: str, vocab_only: bool = False, plain: bool = False) -> Any:
    """The model; `RuntimeError` when llama.cpp refuses it."""
    options = llama_cpp.llama_model_default_params()
    options.vocab_only = vocab_only
    options.use_extra_bufts = not plain
    model = llama_cpp.llama_model_load_from_file(path.encode(), options)
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {path}")
    return model


def generate(
    model: str, prompts: list[list[int]], steps: int, logits: str, flash: bool = False, plain: bool = False
) -> dict[str, Any]:
    """The best token after each prompt, and again, `steps` times; end tokens do not end it."""
    loaded = load(model, plain=plain)
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 256
    options.n_threads = options.n_threads_batch = 1
    options.type_k = options.type_v = F32
    options.flash_attn_type = int(flash)
    context = llama_cpp.llama_init_from_model(loaded, options)
    width = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))
    rows, out = np.empty((len(prompts), steps, width), np.float32), []
    for i, prompt in enumerate(prompts):
        if memory := llama_cpp.llama_get_memory(context):
            llama_cpp.llama_memory_clear(memory, True)
        given, made = list(prompt), []
        if llama_cpp.llama_model_has_encoder(loaded):
            tokens = (ctypes.c_int32 * len(given))(*given)
            if llama_cpp.llama_encode(context, llama_cpp.llama_batch_get_one(tokens, len(given))):
                raise RuntimeError("llama_encode failed")
            given = [llama_cpp.llama_model_decoder_start_token(loaded)]
        for step in range(steps):
            tokens = (ctypes.c_int32 * len(given))(*given)
            if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(given))):
                raise RuntimeError("llama_decode failed")
            rows[i, step] = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (width,))
            given = [int(rows[i, step].argmax())]
            made += given
        out.append(made)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(loaded)
    np.save(logits, rows)
    return {"tokens": out}


def embed(model: str, prompts: list[list[int]], vectors: str, causal: bool = True) -> dict[str, Any]:
    """A vector of each prompt, as it is behind the pooling, or the logits of classes."""
    loaded = load(model)
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 512
    options.n_threads = options.n_threads_batch = 1
    options.embeddings = True
    options.flash_attn_type = 0
    options.type_k = options.type_v = F32
    labels = llama_cpp.llama_model_n_cls_out(loaded)
    if not causal:
        options.attention_type = llama_cpp.LLAMA_ATTENTION_TYPE_NON_CAUSAL
    context = llama_cpp.llama_init_from_model(loaded, options)
    kind = llama_cpp.llama_pooling_type(context)
    if kind == llama_cpp.LLAMA_POOLING_TYPE_NONE:
        llama_cpp.llama_free(context)
        options.pooling_type = llama_cpp.LLAMA_POOLING_TYPE_MEAN
        context = llama_cpp.llama_init_from_model(loaded, options)
    ranks = kind == llama_cpp.LLAMA_POOLING_TYPE_RANK
    width = labels if ranks else llama_cpp.llama_model_n_embd(loaded)
    rows = np.empty((len(prompts), width), np.float32)
    for i, prompt in enumerate(prompts):
        if memory := llama_cpp.llama_get_memory(context):
            llama_cpp.llama_memory_clear(memory, True)
        batch = llama_cpp.llama_batch_init(len(prompt), 0, 1)
        batch.n_tokens = len(prompt)
        for at, token in enumerate(prompt):
            batch.token[at], batch.pos[at], batch.logits[at] = token, at, True
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        rows[i] = np.ctypeslib.as_array(llama_cpp.llama_get_embeddings_seq(context, 0), (width,))
        llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(loaded)
    np.save(vectors, rows)
    return {"width": width}


def quantize(source: str, out: str, format: int) -> dict[str, Any]:
    """Write `out`."""
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = format
    options.nthread = 1
    code = llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(options))
    if code:
        raise RuntimeError(f"llama_model_quantize returned {code}")
    return {}


def tokenize(model: str, texts: list[str], special: bool) -> dict[str, Any]:
    """Ids of texts with the tokens that the file adds; `special`: control tokens in a text are taken as such."""
    loaded = load(model, vocab_only=True)
    vocab = llama_cpp.llama_model_get_vocab(loaded)
    ids, back = [], []
    for text in texts:
        raw = text.encode()
        room = (ctypes.c_int32 * (2 * len(raw) + 8))()
        count = llama_cpp.llama_tokenize(vocab, raw, len(raw), room, len(room), True, special)
        ids.append(list(room[:count]))
        buffer = ctypes.create_string_buffer(16 * len(raw) + 64)
        size = llama_cpp.llama_detokenize(vocab, room, count, buffer, len(buffer), False, True)
        back.append(buffer.raw[: max(size, 0)].decode("utf-8", "replace"))
    llama_cpp.llama_model_free(loaded)
    return {"ids": ids, "texts": back}


def main() -> None:
    """Answer until the input ends."""
    llama_cpp.llama_log_set(KEPT, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    commands = {"generate": generate, "quantize": quantize, "tokenize": tokenize, "embed": embed}
    for line in sys.stdin:
        command = json.loads(line)
        LINES.clear()
        try:
            answer = commands[command.pop("do")](**command)
        except RuntimeError as error:
            answer = {"error": f"{error}: {''.join(LINES)[-600:]}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
