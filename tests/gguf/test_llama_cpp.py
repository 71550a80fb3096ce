"""GGUF files beside llama.cpp: greedy generations of tiny random models, and token ids of nasty texts.

llama.cpp runs in an environment of its own, which `python -m quire.bench.suite.environments FOLDER llama` makes and
prints; QUIRE_LLAMA_CPP names it. Files are written by llama.cpp's converter and quantized by llama-quantize.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from gguf_models import random_blocks, write_gguf
from gguf_writing import add_tokenizer, pieces
from llama_cpp_peer import ENVIRONMENT, MADE, MODELS, MOST, STEPS, TEXTS, Peer, replay, size, write_released
from llama_cpp_peer import peer as peer
from llama_cpp_peer import pytestmark as pytestmark
from paged_model import prompt
from paths import SUPPORT
from quire.compress.layouts.gguf import write_gguf as write_folder
from quire.gguf.file import GgufFile
from quire.quant.gguf import TYPES, Block
from quire.text.tokenizer import Tokenizer
from torch_weights import load_torch

WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2,
        "vocab_size": 320}  # fmt: skip
FORMATS = {"F32": None, "F16": 1, "Q8_0": 7, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_M": 12,
           "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "IQ3_S": 26,
           "TQ1_0": 36, "TQ2_0": 37, "MXFP4": 38}  # fmt: skip
"""Name -> enum llama_ftype; those of IQ1, IQ2 and IQ3_XXS are not made without statistics of the model's activations.

"MXFP4" has its experts in that type and the rest in Q8_0."""
EVERYWHERE = ("F32", "F16", "Q8_0", "Q4_0", "Q4_K_M")
CASES = [(model, name) for model in MODELS for name in FORMATS if model == "llama" or name in EVERYWHERE]
CASES += [(model, "MXFP4") for model in ("mixtral", "gpt-oss")]
CASES.remove(("llama", "MXFP4"))
GGUF_BLOCKS = TYPES.keys() - {"Q1_0", "Q2_0", "Q8_1", "Q8_K"}
"""Types of which random blocks are made with numbers of usual size."""
FLOATS = ("F32", "F16")
NO_WORSE = {False: 1.2, True: 3.0}
"""Our distance from the logits with activations unrounded, relative to llama.cpp's: without and with experts or
states."""
APART = {False: 0.06, True: 0.5}
"""llama.cpp's distance from those logits, relative to their size.

Both round activations to 8 bits (llama.cpp in blocks of 32 or 256, and to f16 beside F16 weights). In models with
experts that now and then turns a router's choice, and then all that follows, and a state keeps what it was; a file
misread would be 1.4 away.
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an F32 file of every model, written by the converter from a checkpoint."""
    folder = tmp_path_factory.mktemp("converted")
    commands = []
    for name, (kind, facts) in MODELS.items():
        if name in MADE:
            write_gguf(folder / f"{name}.F32.gguf", kind, **WIDE | facts)
            continue
        write_released(folder / name, name, **WIDE)
        commands.append(json.dumps({"folder": str(folder / name), "out": str(folder / f"{name}.F32.gguf")}))
    sources = next(Path(ENVIRONMENT).glob("sources/*/vendor/llama.cpp"))
    script = [sys.executable, str(SUPPORT / "llama_cpp_convert.py"), str(sources)]
    done = subprocess.run(script, input="\n".join(commands), text=True, check=True, capture_output=True)
    assert "error" not in done.stdout, done.stdout
    return folder


@pytest.mark.parametrize(("model", "name"), CASES)
def test_greedy_generations(model: str, name: str, peer: Peer, files: Path, tmp_path: Path) -> None:
    """Another token is chosen only where the roundings of activations, which differ, turn the order of two logits.

    F32 files have no such roundings. Elsewhere we must be as near to the logits without any as llama.cpp is.
    """
    path, number = files / f"{model}.{name}.gguf", FORMATS[name]
    if number is not None:
        peer.ask(do="quantize", source=str(files / f"{model}.F32.gguf"), out=str(path), format=number)
    prompts = [prompt(11, 1), prompt(5, 2), [1]]
    tensors = GgufFile(path).tensors
    asked = {"do": "generate", "prompts": prompts, "steps": STEPS, "logits": str(tmp_path / "logits.npy")}
    answer = peer.ask(model=str(path), plain=any(".attn_k_b." in tensor for tensor in tensors), **asked)
    theirs = np.load(tmp_path / "logits.npy")
    exact = replay(path, prompts, answer["tokens"], activations="int16", dtype="float32")
    sensitive = any("_exps" in tensor or ".ssm_a" in tensor for tensor in tensors)
    ours = exact if name in FLOATS else replay(path, prompts, answer["tokens"], activations="int8", dtype="float32")
    if name == "F32":
        assert np.abs(ours - theirs).max() <= MOST * np.abs(theirs).max()
    if name == "F32" or (name in FLOATS and not sensitive):
        assert (ours.argmax(-1) == theirs.argmax(-1)).all()
    away, mine = size(theirs - exact) / size(exact), size(ours - exact) / size(exact)
    assert away <= APART[sensitive] and mine <= NO_WORSE[sensitive] * away
    same = (ours.argmax(-1) == theirs.argmax(-1)).mean()
    plain = (exact.argmax(-1) == theirs.argmax(-1)).mean()
    print(f"{model} {name}: {away:.1e} theirs, {mine:.1e} ours; equal tokens {plain:.1%}, int8 {same:.1%}")


@pytest.mark.parametrize("name", sorted(TYPES.keys() - {"Q8_1"}))  # which ggml does not dequantize
def test_numbers_are_those_that_ggml_takes_out_of_blocks(name: str) -> None:
    """Exactly, of random blocks; those of Q1_0, Q2_0 and Q8_K begin with a scale, which shall be a usual number."""
    block = TYPES[name]
    if name in GGUF_BLOCKS:
        raw = random_blocks((5, 768), gguf.GGMLQuantizationType[name], seed=3)
    else:
        raw = np.random.default_rng(3).integers(0, 256, (5, 768 // block.numbers, block.nbytes), dtype=np.uint8)
        wide = np.float32 if name == "Q8_K" else np.float16
        raw[..., : np.dtype(wide).itemsize] = np.array([0.0123], wide).view(np.uint8)
        raw = raw.reshape(5, -1)
    want = np.zeros((5, 768), np.float32)
    library = ctypes.CDLL(str(Path(ENVIRONMENT) / "build" / "bin" / "libggml-base.so"))
    dequantize = getattr(library, f"dequantize_row_{name.lower().replace('_k', '_K')}")
    dequantize.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    for row, out in zip(np.ascontiguousarray(raw), want, strict=True):
        dequantize(row.ctypes.data, out.ctypes.data, 768)
    weight = load_torch(Block(block), {name: torch.from_numpy(raw)}, torch.float32)
    assert np.array_equal(weight.dequantize().numpy(), want)


OTHERWISE = ("falcon-h1", "nemotron_h_moe", "gpt-oss", "gemma4 experts")
"""Models whose multipliers are written into other matrices, whose queries and keys lie in another order that none of
their products tells, one whose YaRN of transformers' default no key says, and one whose gate and up of experts are
written apart."""


@pytest.mark.parametrize("model", [name for name in MODELS if name not in (*MADE, *OTHERWISE)])
def test_written_files_hold_the_tensors_of_converted_ones(model: str, files: Path, tmp_path: Path) -> None:
    """Names, shapes but for axes of one, and numbers are equal; so are keys that both have."""
    add_tokenizer(files / model, pieces())
    write_folder(files / model, tmp_path / "model.gguf", "F32")
    theirs, ours = (gguf.GGUFReader(path) for path in (files / f"{model}.F32.gguf", tmp_path / "model.gguf"))
    one, other = ({tensor.name: tensor.data.squeeze() for tensor in file.tensors} for file in (theirs, ours))
    assert set(one) == set(other)
    unlike = [name for name in one if one[name].shape != other[name].shape or not np.allclose(one[name], other[name])]
    assert not unlike
    for key in {key for key in theirs.fields if "." in key and not key.startswith(OUTSIDE)} & set(ours.fields):
        a, b = theirs.fields[key].contents(), ours.fields[key].contents()
        assert a == b or np.allclose(a, b) or key.endswith(INVENTED), key


OUTSIDE = ("general.", "tokenizer.", "GGUF.")
INVENTED = (".context_length", ".expert_shared_feed_forward_length", ".rope.dimension_sections")
"""Keys to which the converter gives numbers that config.json has not, or that mean nothing of text."""
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
