"""What is written as GGUF beside llama.cpp: bytes of every format, greedy generations, token ids.

QUIRE_LLAMA_CPP names its environment, as for tests/gguf/test_llama_cpp.py.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_families import GPT_OSS
from gguf_writing import SHAPE, add_tokenizer, byte_level, decoded, normal, pieces
from llama_cpp_models import FURTHER
from llama_cpp_peer import ENVIRONMENT, MODELS, MOST, NEMOTRON, TEXTS, Peer, replay, size
from llama_cpp_peer import peer as peer
from llama_cpp_peer import pytestmark as pytestmark
from oracle import write
from paged_model import prompt
from quire.compress.layouts.gguf import write_gguf
from quire.gguf.encode import ENCODERS, SIZES, encode
from quire.gguf.writer import TYPES
from quire.text.tokenizer import Tokenizer

__all__ = ["peer", "pytestmark"]
WRITTEN = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "mixtral", "qwen3moe", "qwen3next", "qwen35",
           "qwen35moe", "lfm2", "lfm2moe", "granitehybrid", "nemotron_h_moe", "mamba2", "mamba", "falcon-mamba",
           "jamba", "deepseek2", "deepseek2 third", "deepseek2 yarn", "kimi-linear", "falcon-h1", "phi2",
           "qwen2moe", *FURTHER)  # fmt: skip
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}


@pytest.mark.parametrize("kind", [kind for kind in ENCODERS if kind != "F32"])
@pytest.mark.parametrize("numbers", ["normal", "shifted", "heavy"])
def test_numbers_are_rounded_as_ggml_does(kind: str, numbers: str) -> None:
    """Sums are taken in another order, which now and then turns a choice between two scales."""
    x = normal(64, 2048)
    x = {"normal": x, "shifted": x * 0.02 + 0.01, "heavy": x**3 * 0.02}[numbers].astype(np.float32)
    library = ctypes.CDLL(str(Path(ENVIRONMENT) / "build" / "bin" / "libggml-base.so"))
    quantize = library.ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    block = SIZES[kind]
    want = np.zeros((64, 2048 // block.numbers * block.nbytes), np.uint8)
    assert quantize(TYPES[kind][0], x.ctypes.data, want.ctypes.data, 0, 64, 2048, None) == want.nbytes
    got = encode(x, kind)
    errors = [float(np.sqrt(((decoded(raw, kind) - x) ** 2).mean())) for raw in (got, want)]
    assert errors[0] <= errors[1] * 1.002
    assert (got == want).mean() >= (0.9 if kind.endswith("K") else 1.0)


OWN = {
    "nemotron_h": ("nemotron_h", NEMOTRON | {"hybrid_override_pattern": "M-M*-"}),
    "granitehybrid dense": ("granitemoehybrid", MODELS["granitehybrid"][1] | {"num_local_experts": 0}),
    "gpt-oss truncated": ("gpt_oss", MODELS["gpt-oss"][1] | {"rope_parameters": GPT_OSS["rope_parameters"]}),
    "jamba dense": ("jamba", MODELS["jamba"][1] | {"num_experts": 1}),
}
"""Models that llama.cpp reads, but does not convert from what transformers writes, and some beside."""
CASES = [(name, "F32") for name in (*WRITTEN, *OWN)]
CASES += [("llama", kind) for kind in ("F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q6_K")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_llama_cpp_reads_what_is_written(name: str, kind: str, peer: Peer, tmp_path: Path) -> None:
    family, facts = (MODELS | OWN)[name]
    write(tmp_path, family, **SHAPE | WIDE | facts)
    add_tokenizer(tmp_path, byte_level())
    path = tmp_path / "model.gguf"
    write_gguf(tmp_path, path, kind)
    prompts = [prompt(11, 1), prompt(5, 2), [1]]
    answer: dict[str, Any] = peer.ask(
        do="generate", model=str(path), prompts=prompts, steps=32, logits=str(tmp_path / "logits.npy")
    )
    theirs = np.load(tmp_path / "logits.npy")
    exact = replay(path, prompts, answer["tokens"], activations="int16", dtype="float32")
    if kind == "F32":
        assert np.abs(exact - theirs).max() <= MOST * np.abs(theirs).max()
    assert size(theirs - exact) <= 0.06 * size(exact)


def test_llama_cpp_reads_several_files(peer: Peer, tmp_path: Path) -> None:
    write(tmp_path / "model", "llama", **SHAPE | WIDE)
    add_tokenizer(tmp_path / "model", byte_level())
    write_gguf(tmp_path / "model", tmp_path / "whole.gguf", "Q8_0")
    write_gguf(tmp_path / "model", tmp_path / "parts.gguf", "Q8_0", most=200_000)
    parts = sorted(tmp_path.glob("parts-*.gguf"))
    assert len(parts) > 2
    asked = {"do": "generate", "prompts": [prompt(11, 1), [1]], "steps": 16, "logits": str(tmp_path / "logits.npy")}
    want = peer.ask(model=str(tmp_path / "whole.gguf"), **asked)["tokens"]
    assert peer.ask(model=str(parts[0]), **asked)["tokens"] == want


@pytest.mark.parametrize("kind", ["bytes qwen2", "bytes gpt-2", "bytes llama3", "pieces"])
def test_llama_cpp_gives_the_same_token_ids(kind: str, peer: Peer, tmp_path: Path) -> None:
    write(tmp_path, "llama", **SHAPE | WIDE)
    add_tokenizer(tmp_path, pieces() if kind == "pieces" else byte_level(kind.removeprefix("bytes ")))
    write_gguf(tmp_path, tmp_path / "model.gguf", "F16")
    tokenizer = Tokenizer.from_folder(tmp_path)
    want = peer.ask(do="tokenize", model=str(tmp_path / "model.gguf"), texts=TEXTS, special=False)["ids"]
    got = [tokenizer.encode(text, special=False) for text in TEXTS]
    wrong = [(text, g, w) for text, g, w in zip(TEXTS, got, want, strict=True) if g != w]
    assert not wrong, f"{len(wrong)} texts, the first: {wrong[0]}"
