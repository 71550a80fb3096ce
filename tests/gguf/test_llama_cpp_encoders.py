"""Encoders beside llama.cpp: its converter's files of tiny checkpoints, and ours, give the same vectors in both.

QUIRE_LLAMA_CPP names its environment, as for tests/gguf/test_llama_cpp.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from encoder_models import write_encoder
from gguf_encoder_models import CONVERTED, MADE, as_released, write_dense, write_model
from gguf_vocabularies import unigrams, wordpiece
from gguf_writing import SHAPE, VOCAB, add_tokenizer, byte_level
from llama_cpp_peer import TEXTS, Converter, Peer
from llama_cpp_peer import peer as peer
from llama_cpp_peer import pytestmark as pytestmark
from oracle import write
from paged_model import prompt
from quire import LLM
from quire.compress.layouts.gguf import write_gguf
from quire.core.errors import ModelError
from quire.gguf.file import GgufFile
from quire.model.describe import open_model
from quire.text.tokenizer import Tokenizer as TextTokenizer

__all__ = ["peer", "pytestmark"]
PROMPTS = [prompt(n, n) for n in (1, 7, 64, 127)]
PIECES = ("bert", "distilbert", "nomic-bert", *MADE)
LEAST = 1 - 1e-6
"""Cosine of vectors of F32 files."""
BY_TABLE = {"gemma-embedding": 1 - 5e-6}
"""The same of GELU that llama.cpp takes from a table of f16, and no norm makes small."""


@pytest.fixture(scope="module")
def converter() -> Iterator[Converter]:
    it = Converter()
    yield it
    it.end()


def vectors(path: Path) -> np.ndarray[Any, Any]:
    """Ours, or probabilities of classes."""
    with LLM(path, device="cpu", num_blocks=512, dtype="float32") as llm:
        found = llm.encode([{"prompt_token_ids": each} for each in PROMPTS], use_tqdm=False)
    return np.stack([each.outputs.data for each in found])


def assert_same_vectors(path: Path, peer: Peer, name: str = "", causal: bool = True) -> None:
    kept = path.with_suffix(".npy")
    peer.ask(do="embed", model=str(path), prompts=PROMPTS, vectors=str(kept), causal=causal)
    for ours, theirs in zip(vectors(path), np.load(kept), strict=True):
        assert ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs) >= BY_TABLE.get(name, LEAST)


@pytest.mark.parametrize("name", CONVERTED | MADE)
def test_vectors_of_converted_files(name: str, peer: Peer, converter: Converter, tmp_path: Path) -> None:
    write_model(tmp_path / "model", name)
    as_released(tmp_path / "model", name)
    converter.convert(tmp_path / "model", tmp_path / "theirs.gguf")
    assert_same_vectors(tmp_path / "theirs.gguf", peer, name)


def vocabulary_of(name: str) -> Tokenizer:
    """A tokenizer of the kind that the model's family has."""
    return unigrams() if name == "xlm-roberta" else wordpiece() if name in PIECES else byte_level("gpt-2")


@pytest.mark.parametrize("name", CONVERTED | MADE)
def test_vectors_of_written_files(name: str, peer: Peer, tmp_path: Path) -> None:
    write_model(tmp_path / "model", name, vocab_size=VOCAB)
    add_tokenizer(tmp_path / "model", vocabulary_of(name))
    write_gguf(tmp_path / "model", tmp_path / "ours.gguf", "F32")
    assert_same_vectors(tmp_path / "ours.gguf", peer, name)
    np.testing.assert_array_equal(vectors(tmp_path / "model"), vectors(tmp_path / "ours.gguf"))


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta", "modern-bert"])
def test_classes_of_written_files(name: str, labels: int, peer: Peer, tmp_path: Path) -> None:
    folder, path = tmp_path / "model", tmp_path / "ours.gguf"
    write_model(folder, name, "ForSequenceClassification", vocab_size=VOCAB, num_labels=labels)
    add_tokenizer(folder, vocabulary_of(name))
    write_gguf(folder, path, "F32")
    peer.ask(do="embed", model=str(path), prompts=PROMPTS, vectors=str(tmp_path / "logits.npy"))
    logits = torch.from_numpy(np.load(tmp_path / "logits.npy"))
    want = logits.sigmoid() if labels == 1 else logits.softmax(1)
    np.testing.assert_allclose(vectors(path), want.numpy(), atol=1e-3)
    np.testing.assert_array_equal(vectors(folder), vectors(path))


@pytest.mark.parametrize("name", ["roberta", "xlm-roberta", "modern-bert", "distilbert"])
def test_classes_of_converted_files(name: str, peer: Peer, converter: Converter, tmp_path: Path) -> None:
    """The converter does not say that these make classes: who runs llama.cpp does."""
    folder, path = tmp_path / "model", tmp_path / "theirs.gguf"
    write_model(folder, name, "ForSequenceClassification", num_labels=3)
    want = vectors(folder)
    as_released(folder, name)
    converter.convert(folder, path)
    np.testing.assert_array_equal(vectors(path), want)


def test_classes_without_the_layer_before_them_are_refused(converter: Converter, tmp_path: Path) -> None:
    write_model(tmp_path / "model", "bert", "ForSequenceClassification", num_labels=3)
    as_released(tmp_path / "model", "bert")
    converter.convert(tmp_path / "model", tmp_path / "theirs.gguf")
    with pytest.raises(ModelError, match="leaves out that of BERT"):
        vectors(tmp_path / "theirs.gguf")


def test_two_dense_layers(peer: Peer, converter: Converter, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_model(folder, "gemma-embedding", vocab_size=VOCAB)
    write_dense(folder, 64, 96, 64)
    add_tokenizer(folder, byte_level("gpt-2"))
    write_gguf(folder, tmp_path / "ours.gguf", "F32")
    as_released(folder, "gemma-embedding")
    converter.convert(folder, tmp_path / "theirs.gguf", sentence_transformers_dense_modules=True)
    for name in ("ours.gguf", "theirs.gguf"):
        assert_same_vectors(tmp_path / name, peer, "gemma-embedding")
        np.testing.assert_array_equal(vectors(folder), vectors(tmp_path / name))


def test_classes_of_few_bits(peer: Peer, tmp_path: Path) -> None:
    """llama-quantize makes codes of the matrices behind the pooled row, too."""
    folder, path = tmp_path / "model", tmp_path / "ours.gguf"
    write_model(folder, "bert", "ForSequenceClassification", vocab_size=VOCAB, num_labels=3)
    add_tokenizer(folder, wordpiece())
    write_gguf(folder, path, "F32")
    peer.ask(do="quantize", source=str(path), out=str(tmp_path / "q8.gguf"), format=7)
    assert GgufFile(tmp_path / "q8.gguf").tensors["cls.weight"].type.name == "Q8_0"
    np.testing.assert_allclose(vectors(tmp_path / "q8.gguf"), vectors(path), atol=0.02)


@pytest.mark.parametrize("tied", [False, True])
def test_rerankers_that_say_yes_or_no(tied: bool, peer: Peer, converter: Converter, tmp_path: Path) -> None:
    folder, path = tmp_path / "qwen3-reranker", tmp_path / "theirs.gguf"
    write(folder, "qwen3", **SHAPE, tie_word_embeddings=tied)
    tokenizer = byte_level()
    tokenizer.add_tokens(["yes", "no", "|"])
    add_tokenizer(folder, tokenizer)
    converter.convert(folder, path)
    peer.ask(do="embed", model=str(path), prompts=PROMPTS, vectors=str(tmp_path / "both.npy"))
    np.testing.assert_allclose(vectors(path), np.load(tmp_path / "both.npy")[:, :1], atol=1e-5)
    opened = open_model(str(path)).pooling
    assert (opened.kind, opened.labels, opened.generates) == ("last", ("yes",), False)


def test_vectors_of_decoders(peer: Peer, converter: Converter, tmp_path: Path) -> None:
    """Qwen3-Embedding, and a Llama that sees both ways."""
    folder = tmp_path / "qwen3"
    write(folder, "qwen3", **SHAPE)
    write_dense(folder, mode="lasttoken")
    add_tokenizer(folder, byte_level())
    write_gguf(folder, tmp_path / "qwen3.gguf", "F32")
    assert open_model(str(tmp_path / "qwen3.gguf")).pooling.kind == "last"
    assert_same_vectors(tmp_path / "qwen3.gguf", peer)
    write_encoder(tmp_path / "llama", "llama", vocab_size=VOCAB)
    add_tokenizer(tmp_path / "llama", byte_level())
    write_gguf(tmp_path / "llama", tmp_path / "llama.gguf", "F32")
    assert_same_vectors(tmp_path / "llama.gguf", peer)
    as_released(tmp_path / "llama", "llama-embed")
    converter.convert(tmp_path / "llama", tmp_path / "theirs.gguf")
    assert GgufFile(tmp_path / "theirs.gguf").metadata["general.architecture"] == "llama-embed"
    assert_same_vectors(tmp_path / "theirs.gguf", peer, causal=False)


@pytest.mark.parametrize("lowercase", [True, False])
def test_words_are_cut_alike(lowercase: bool, peer: Peer, tmp_path: Path) -> None:
    folder, path = tmp_path / "model", tmp_path / "ours.gguf"
    write_model(folder, "bert", vocab_size=VOCAB)
    add_tokenizer(folder, wordpiece(lowercase))
    write_gguf(folder, path, "F32")
    texts = [text for text in TEXTS if "\x85" not in text]  # which is a space to one, and nothing to the other
    theirs = peer.ask(do="tokenize", model=str(path), texts=texts, special=False)["ids"]
    own, read = (TextTokenizer.from_folder(each) for each in (folder, path))
    assert [read.encode(text) for text in texts] == [own.encode(text) for text in texts] == theirs
