"""GGUF files beside llama.cpp: greedy generations of tiny random models, and token ids of nasty texts.

llama.cpp runs in an environment of its own, which `python -m quire.bench.suite.environments FOLDER llama` makes and
prints; QUIRE_LLAMA_CPP names it. Files are written by llama.cpp's converter and quantized by llama-quantize.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oracle import backend, write
from quire.core.config import flat_config
from quire.gguf.file import GgufFile
from quire.model.build import load_model
from quire.text.tokenizer import Tokenizer
from test_model import Paged, prompt

ENVIRONMENT = os.environ.get("QUIRE_LLAMA_CPP", "")
HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ENVIRONMENT, reason="QUIRE_LLAMA_CPP does not name an environment with llama.cpp"),
]
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2,
        "vocab_size": 320}  # fmt: skip
GEMMA = {"head_dim": 64, "sliding_window": 5, "query_pre_attn_scalar": 64}
EIGHT = {"num_local_experts": 8, "num_experts_per_tok": 2}
NARROW = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 256}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 64}),
    "gemma": ("gemma", {"head_dim": 64}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", GEMMA | {"num_hidden_layers": 7}),
    "phi2": ("phi", {"num_key_value_heads": 4, "intermediate_size": 1024}),
    "phi3": ("phi3", {}),
    "mixtral": ("mixtral", EIGHT),
    "qwen2moe": ("qwen2_moe", NARROW | {"shared_expert_intermediate_size": 512}),
    "qwen3moe": ("qwen3_moe", NARROW | {"head_dim": 64, "norm_topk_prob": True}),
    "gpt-oss": ("gpt_oss", EIGHT | {"head_dim": 64, "sliding_window": 5}),
}
FORMATS = {"F32": None, "F16": 1, "Q8_0": 7, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_M": 12,
           "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "IQ3_S": 26,
           "TQ1_0": 36, "TQ2_0": 37, "MXFP4": 38}  # fmt: skip
"""Name -> enum llama_ftype; those of IQ1, IQ2 and IQ3_XXS are not made without statistics of the model's activations.

"MXFP4" has its experts in that type and the rest in Q8_0."""
EVERYWHERE = ("F32", "F16", "Q8_0", "Q4_0", "Q4_K_M")
CASES = [(model, name) for model in MODELS for name in FORMATS if model == "llama" or name in EVERYWHERE]
CASES += [(model, "MXFP4") for model in ("mixtral", "gpt-oss")]
CASES.remove(("llama", "MXFP4"))
STEPS = 32
FLOATS = ("F32", "F16")
MOST = 1e-3
"""Largest difference of logits in F32 files, relative to the largest logit.

It is below 1e-5 but for GELU, which llama.cpp takes from a table of f16.
"""
NO_WORSE = {False: 1.2, True: 3.0}
"""Our distance from the logits with activations unrounded, relative to llama.cpp's: without and with experts."""
APART = {False: 0.06, True: 0.5}
"""llama.cpp's distance from those logits, relative to their size.

Both round activations to 8 bits (llama.cpp in blocks of 32 or 256, and to f16 beside F16 weights). In models with
experts that now and then turns a router's choice, and then all that follows; a file misread would be 1.4 away.
"""


class Peer:
    """llama.cpp's process."""

    def __init__(self) -> None:
        folder = Path(ENVIRONMENT)
        variables = os.environ | {"LLAMA_CPP_LIB_PATH": str(folder / "build" / "bin")}
        self.process = subprocess.Popen(
            [str(folder / "bin" / "python"), str(HERE / "llama_cpp_answers.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables,
        )  # fmt: skip

    def ask(self, **command: Any) -> dict[str, Any]:
        """Its answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"llama.cpp ended at {command}"
        answer: dict[str, Any] = json.loads(line)
        return answer


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    it = Peer()
    yield it
    with it.process as process:
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an F32 file of every model, written by the converter from a checkpoint."""
    folder = tmp_path_factory.mktemp("converted")
    commands = []
    for name, (kind, facts) in MODELS.items():
        write(folder / name, kind, **WIDE | facts)
        vocab = {str(i): i for i in range(WIDE["vocab_size"])}  # the converter counts the entries of Gemma 3's
        (folder / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))
        commands.append(json.dumps({"folder": str(folder / name), "out": str(folder / f"{name}.F32.gguf")}))
    sources = next(Path(ENVIRONMENT).glob("sources/*/vendor/llama.cpp"))
    script = [sys.executable, str(HERE / "llama_cpp_convert.py"), str(sources)]
    subprocess.run(script, input="\n".join(commands), text=True, check=True, capture_output=True)
    return folder


def replay(path: Path, prompts: list[list[int]], given: list[list[int]], **options: Any) -> np.ndarray[Any, Any]:
    """Our logits [prompts, steps, vocabulary] after each prompt and each of the tokens `given` but the last."""
    model = load_model(flat_config(model=str(path), **options), backend("cpu"))
    rows = [
        Paged(model, [tokens + more[:-1]]).run([[len(tokens) + STEPS - 1]])[0][-STEPS:]
        for tokens, more in zip(prompts, given, strict=True)
    ]
    return torch.stack(rows).numpy()


def size(x: np.ndarray[Any, Any]) -> float:
    """Root of the mean square."""
    return float(np.sqrt(np.square(x, dtype=np.float64).mean()))


@pytest.mark.parametrize(("model", "name"), CASES)
def test_greedy_generations(model: str, name: str, peer: Peer, files: Path, tmp_path: Path) -> None:
    """Another token is chosen only where the roundings of activations, which differ, turn the order of two logits.

    F32 files have no such roundings. Elsewhere we must be as near to the logits without any as llama.cpp is.
    """
    path, number = files / f"{model}.{name}.gguf", FORMATS[name]
    if number is not None:
        peer.ask(do="quantize", source=str(files / f"{model}.F32.gguf"), out=str(path), format=number)
    prompts = [prompt(11, 1), prompt(5, 2), [1]]
    answer = peer.ask(do="generate", model=str(path), prompts=prompts, steps=STEPS, logits=str(tmp_path / "logits.npy"))
    theirs = np.load(tmp_path / "logits.npy")
    exact = replay(path, prompts, answer["tokens"], activations="int16", dtype="float32")
    experts = any("_exps" in tensor for tensor in GgufFile(path).tensors)
    ours = exact if name in FLOATS else replay(path, prompts, answer["tokens"], activations="int8", dtype="float32")
    if name == "F32":
        assert np.abs(ours - theirs).max() <= MOST * np.abs(theirs).max()
    if name == "F32" or (name in FLOATS and not experts):
        assert (ours.argmax(-1) == theirs.argmax(-1)).all()
    away, mine = size(theirs - exact) / size(exact), size(ours - exact) / size(exact)
    assert away <= APART[experts] and mine <= NO_WORSE[experts] * away
    same = (ours.argmax(-1) == theirs.argmax(-1)).mean()
    plain = (exact.argmax(-1) == theirs.argmax(-1)).mean()
    print(f"{model} {name}: {away:.1e} theirs, {mine:.1e} ours; equal tokens {plain:.1%}, int8 {same:.1%}")


TEXTS = [
    "", " ", "   ", "\t", "\n\n\n", " \n ", "Hello, world", " Hello", "Hello  world ", "3.14159 1,000,000 0x1F 2^10",
    "a\u0301 \u00e1 \u212b \ufb01",
    "it's I'LL don't WE'VE", "\u2581under_bar\u2581", "!!!???...---===", "<0x0A> <0xFF>",
    "\u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093\u306b\u3061\u306f \ud55c\uad6d\uc5b4", "\u0130stanbul \u017f \u00df",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea", "\x00\x01\x7f", "a" * 32, "x" * 300,
    "\u00a0\u2003\u200b\ufeffx\u0085y\u2028z", "def f(x):\n\treturn x**2  # ok\r\n",
]  # fmt: skip
CONTROL = "</s> <s> <|endoftext|> <|im_start|>user"
VOCABULARIES = ("command-r", "deepseek-coder", "falcon", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2",
                "refact", "starcoder")  # fmt: skip


@pytest.mark.parametrize("name", VOCABULARIES)
def test_token_ids_of_published_vocabularies(name: str, peer: Peer) -> None:
    """Ids of nasty texts, of llama.cpp's own too.

    Control tokens in a text: for "phi-3" llama.cpp strips what follows them, because of the model's name, and for
    "qwen2" it takes "</s>" for one, which the file does not say; elsewhere they are the same. Where they shall be plain
    text, ours is cut within them on purpose.
    """
    path = next(Path(ENVIRONMENT).glob("sources/*/vendor/llama.cpp/models")) / f"ggml-vocab-{name}.gguf"
    own = path.with_suffix(".gguf.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    tokenizer = Tokenizer.from_folder(path)
    for special in (False, True):
        texts = TEXTS + own + ([CONTROL] if special and name not in ("phi-3", "qwen2") else [])
        want = peer.ask(do="tokenize", model=str(path), texts=texts, special=special)["ids"]
        got = [tokenizer.encode(text, special=special) for text in texts]
        wrong = [(text, g, w) for text, g, w in zip(texts, got, want, strict=True) if g != w]
        assert not wrong, f"{len(wrong)} texts, the first: {wrong[0]}"
