"""Every architecture that is written beside llama.cpp: its converter's file of a tiny checkpoint, and ours.

QUIRE_LLAMA_CPP names its environment, as for tests/gguf/test_llama_cpp.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from family_tensors import rewrite
from gguf_encoder_models import CONVERTED, MADE
from gguf_newer import DEEP
from gguf_vocabularies import unigrams, wordpiece, write_wordpiece
from gguf_writing import add_tokenizer
from gguf_written import WRITTEN, write_folder
from llama_cpp_peer import ENVIRONMENT, MODELS, MOST, STEPS, TEXTS, Converter, Peer, count_tokens, replay
from llama_cpp_peer import peer as peer
from llama_cpp_peer import pytestmark as pytestmark
from llama_cpp_read import READ_ONLY, write_released
from llama_cpp_released import FLASH, LOUDER, NOT_CONVERTED, NOT_READ, RELEASED, TENSORS
from oracle import edit_config
from paged_model import prompt
from quire.compress.layouts.gguf import write_gguf
from quire.compress.layouts.gguf_vocab import vocabulary
from quire.gguf.file import GgufFile
from quire.gguf.vocab import KINDS
from quire.gguf.writer import write_file
from quire.model.disk.gguf_architectures import ARCHITECTURES
from quire.model.families.elsewhere import why_no_gguf
from quire.text.gguf_tokenizer import read_tokenizer
from quire.text.gguf_words import PRE

__all__ = ["peer", "pytestmark"]
PROMPTS = [prompt(11, 1), prompt(5, 2), [1]]


@pytest.fixture(scope="module")
def converter() -> Iterator[Converter]:
    it = Converter()
    yield it
    it.end()


def assert_equal_tokens(name: str, path: Path, peer: Peer) -> list[list[int]]:
    """llama.cpp's greedy tokens, after each of which ours is the same."""
    logits = path.with_suffix(".npy")
    asked = {"do": "generate", "prompts": PROMPTS, "steps": STEPS, "logits": str(logits), "flash": name in FLASH}
    answer: dict[str, Any] = peer.ask(model=str(path), **asked)
    theirs = np.load(logits) / LOUDER.get(name, 1.0)
    ours = replay(path, PROMPTS, answer["tokens"], on="reference", dtype="float32")
    assert np.abs(ours - theirs).max() <= MOST * np.abs(theirs).max()
    assert (ours.argmax(-1) == theirs.argmax(-1)).all()
    found: list[list[int]] = answer["tokens"]
    return found


@pytest.mark.parametrize("name", [name for name in WRITTEN | DEEP if name not in NOT_READ])
def test_both_files_give_the_same_tokens(name: str, peer: Peer, converter: Converter, tmp_path: Path) -> None:
    folder, ours, theirs = tmp_path / "model", tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    write_folder(folder, name)
    write_gguf(folder, ours, "F32")
    tokens = assert_equal_tokens(name, ours, peer)
    if name not in NOT_CONVERTED:
        released, config = RELEASED.get(name, {}), json.loads((folder / "config.json").read_text())
        absent = {key for key, value in config.items() if value is None} - set(released)
        edit_config(folder, tuple(absent), **released)
        count_tokens(folder)
        if name in TENSORS:
            rewrite(folder, TENSORS[name])
        converter.convert(folder, theirs)
        assert assert_equal_tokens(name, theirs, peer) == tokens


@pytest.mark.parametrize("name", READ_ONLY)
def test_files_that_are_only_read_give_the_same_tokens(
    name: str, peer: Peer, converter: Converter, tmp_path: Path
) -> None:
    folder, theirs = tmp_path / "model", tmp_path / "theirs.gguf"
    write_released(folder, name)
    count_tokens(folder)
    converter.convert(folder, theirs)
    assert GgufFile(theirs).metadata["general.architecture"] == name
    assert_equal_tokens(name, theirs, peer)


LLAMA_EMBED = {"llama-embed"}
"""Is only read, and makes vectors, which test_llama_cpp_encoders.py compares, as it does those of all encoders."""


def test_every_architecture_is_compared_or_there_is_a_reason() -> None:
    """Of files that llama.cpp's converter makes, here, in test_llama_cpp.py or in test_llama_cpp_encoders.py."""
    made = {name.split()[0] for name in WRITTEN | DEEP if name not in NOT_READ and name not in NOT_CONVERTED}
    told = {name.split()[0] for name in NOT_READ | NOT_CONVERTED}
    assert set(READ_ONLY) | LLAMA_EMBED == {name for name, own in ARCHITECTURES.items() if own.read_only}
    made |= {*CONVERTED, *MADE} | LLAMA_EMBED
    assert not set(ARCHITECTURES) - made - told - set(READ_ONLY) - set(MODELS)


def source(name: str) -> str:
    """A file of llama.cpp's sources."""
    return next(Path(ENVIRONMENT).glob("sources/*/vendor/llama.cpp/src")).joinpath(name).read_text(encoding="utf-8")


def test_every_way_to_cut_text_is_known() -> None:
    assert set(re.findall(r'tokenizer_pre == "([^"]+)"', source("llama-vocab.cpp"))) <= set(PRE)


REFUSED = {"rwkv", "plamo2", "hybriddna", "test", "none", "no_vocab"}
"""Kinds of vocabularies that no tokenizer is made of."""


def test_every_kind_of_vocabulary_is_known_or_refused() -> None:
    assert set(re.findall(r'tokenizer_model == "([^"]+)"', source("llama-vocab.cpp"))) == set(KINDS) | REFUSED


def test_every_architecture_is_read_or_there_is_a_reason() -> None:
    names = set(re.findall(r'\{ LLM_ARCH_\w+, +"([^"]+)" +\}', source("llama-arch.cpp"))) - {"clip", "(unknown)"}
    assert len(names) > 140
    assert not [name for name in names if name not in ARCHITECTURES and not why_no_gguf(name)]


@pytest.mark.parametrize("kind", ["unigrams", "unigrams with spaces", "wordpiece", "wordpiece with case"])
def test_token_ids_of_other_vocabularies(kind: str, peer: Peer, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    if kind.startswith("unigrams"):
        add_tokenizer(tmp_path, unigrams("spaces" not in kind))
        write_file(path, {"general.architecture": "t5"} | vocabulary(tmp_path, 400, None, (1,)), [], [])
    else:
        lowercase = "case" not in kind
        write_wordpiece(path, wordpiece(lowercase), **{"tokenizer.ggml.normalizer.lowercase": lowercase})
    tokenizer = read_tokenizer(path).backend
    texts = [text for text in TEXTS if "\x85" not in text]  # which is a space to one, and nothing to the other
    want = peer.ask(do="tokenize", model=str(path), texts=texts, special=False)["ids"]
    got = [tokenizer.encode(text).ids for text in texts]
    wrong = [(text, g, w) for text, g, w in zip(texts, got, want, strict=True) if g != w]
    assert not wrong, f"{len(wrong)} texts, the first: {wrong[0]}"
