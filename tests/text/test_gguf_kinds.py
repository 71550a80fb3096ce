"""GGUF vocabularies of unigrams and of WordPiece: ids as the tokenizers that they were made of give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from gguf_vocabularies import charsmap, unigrams, wordpiece, write_wordpiece
from gguf_writing import TEXTS, add_tokenizer
from quire.compress.layouts.gguf_vocab import vocabulary
from quire.core.errors import ModelError
from quire.gguf.writer import write_file
from quire.text.gguf_tokenizer import read_tokenizer

FURTHER = ["", "tab\there", "Hello, world ", "\u00c4pfel caf\u00e9", "x" * 300, "the</s>fox", "fox\n the"]


@pytest.mark.parametrize(("merge", "prefix"), [(True, True), (False, True), (False, False)])
def test_unigrams(merge: bool, prefix: bool, tmp_path: Path) -> None:
    tokenizer = unigrams(merge, prefix)
    tokenizer.add_special_tokens([AddedToken("<extra>", normalized=False)])
    add_tokenizer(tmp_path, tokenizer)
    metadata = vocabulary(tmp_path, 400, None, (1,))
    assert metadata["tokenizer.ggml.model"] == "t5"
    assert metadata["tokenizer.ggml.remove_extra_whitespaces"] == merge
    assert metadata["tokenizer.ggml.precompiled_charsmap"].tobytes() == charsmap()
    path = tmp_path / "model.gguf"
    write_file(path, metadata, [], [])
    made = read_tokenizer(path)
    assert made.size == 400 and made.backend.token_to_id("<extra>") == tokenizer.token_to_id("<extra>")
    for text in (*TEXTS, *FURTHER):
        want = tokenizer.encode(text).ids
        assert made.backend.encode(text).ids == want, text
        assert made.backend.decode(want) == tokenizer.decode(want), text


@pytest.mark.parametrize("lowercase", [True, False])
def test_wordpiece(lowercase: bool, tmp_path: Path) -> None:
    tokenizer, path = wordpiece(lowercase), tmp_path / "model.gguf"
    write_wordpiece(path, tokenizer, **({} if lowercase else {"tokenizer.ggml.normalizer.lowercase": False}))
    made = read_tokenizer(path)
    assert made.named["sep_token"] == "[SEP]" and made.backend.get_vocab() == tokenizer.get_vocab()
    for text in (*TEXTS, *FURTHER):
        want = tokenizer.encode(text).ids
        assert made.backend.encode(text).ids == want, text
        assert made.backend.decode(want) == tokenizer.decode(want), text


@pytest.mark.parametrize(
    ("further", "told"),
    [
        ({"tokenizer.ggml.unknown_token_id": 1 << 20}, "unknown_token_id"),
        ({"tokenizer.ggml.tokens": ["a"] * 3}, "same text"),
        ({"tokenizer.ggml.tokens": ["\u2581a", "##", "b"], "tokenizer.ggml.token_type": None}, "unknown"),
    ],
)
def test_what_contradicts_is_refused(further: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    base = {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": ["[UNK]", "\u2581a"],
    }
    write_file(path, {key: value for key, value in (base | further).items() if value is not None}, [], [])
    with pytest.raises(ModelError, match=told):
        read_tokenizer(path)
