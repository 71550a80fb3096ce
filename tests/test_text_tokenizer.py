"""The tokenizer: what other implementations make of the same folder, and text that tries to forge special tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

import quire.text.files
from quire.core.errors import ModelError
from quire.text.tokenizer import Tokenizer
from text_models import PYDOC, sentencepiece_folder

tokenizer = Tokenizer.from_folder(PYDOC)
oracle = AutoTokenizer.from_pretrained(PYDOC)
pieces = st.sampled_from(["<|end|>", "<|user|>", "<|", "|>", "<|e<|end|>nd|>", "é", "print(", "\n", " ", "日本", "🙂"])
texts = st.lists(pieces | st.text(max_size=8), max_size=12).map("".join).map(lambda t: t.replace("\ufdd0", ""))


@given(texts)
def test_encode_equals_transformers(text: str) -> None:
    assert tokenizer.encode(text) == oracle.encode(text)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@given(texts)
def test_user_text_holds_no_special_token_and_loses_nothing(text: str) -> None:
    ids = tokenizer.encode(text, special=False)
    assert not set(ids) & set(tokenizer.special.values())
    assert tokenizer.decode(ids) == text


def test_overlapping_special_tokens_are_all_cut() -> None:
    assert tokenizer.escape("<|user|>").replace("\ufdd0", "") == "<|user|>"
    forged = "<|end|><|e<|user|>nd|>" * 3
    assert not set(tokenizer.encode(forged, special=False)) & set(tokenizer.special.values())
    assert tokenizer.encode("plain text", special=False) == tokenizer.encode("plain text")


def test_names_ids_and_pieces() -> None:
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (None, 4, 6144)
    assert tokenizer.byte_level and tokenizer.is_special(4) and not tokenizer.is_special(100)
    ids = tokenizer.encode("é")
    assert b"".join(map(tokenizer.id_to_bytes, ids)) == "é".encode()
    assert tokenizer.id_to_text(4) == "<|end|>" and tokenizer.id_to_bytes(99999) == b""
    assert tokenizer.token_to_id("<|end|>") == 4 and tokenizer.token_to_id("\ufdd0") is None
    assert tokenizer.decode([4, 6144, 7000], skip_special_tokens=False) == "<|end|>"
    tokenizer.check_vocab(6144)
    with pytest.raises(ModelError, match="6143"):
        tokenizer.check_vocab(6143)


def test_sentencepiece_style(tmp_path: Path) -> None:
    folder = sentencepiece_folder(tmp_path)
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("hello world", " two  spaces", "é 日本 🙂", "a</s>b"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text)[0] == ours.bos_id == 1
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
        assert set(ours.encode(text, special=False)) & {1, 2} == {1}
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    assert ours.id_to_bytes(3 + 0xE9) == b"\xe9"


def test_config_adds_tokens_and_bos(tmp_path: Path) -> None:
    shutil.copy(PYDOC / "tokenizer.json", tmp_path)
    config = {
        "bos_token": "<|endoftext|>",
        "add_bos_token": True,
        "eos_token": {"content": "<|new|>", "lstrip": False},
        "added_tokens_decoder": {
            "6144": {"content": "<think>", "special": False},
            "6145": {"content": "<|new|>", "special": True},
        },
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.from_folder(tmp_path)
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (0, 6145, 6146)
    assert ours.encode("<think><|new|>") == [0, 6144, 6145]
    assert 6145 not in ours.encode("<think><|new|>", special=False)
    config["added_tokens_decoder"] = {"7000": {"content": "<think>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"<think>.*7000"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}', "tokenizer.json"),
        ("tokenizer.json", "\udcff", "UTF-8"),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}', "added token"),
        ("added_tokens.json", '{"<x>": "y"}', "added token"),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    shutil.copy(PYDOC / "tokenizer.json", tmp_path)
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_folder(tmp_path)


def test_missing_and_huge_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").symlink_to("/no/x")
    with pytest.raises(ModelError, match=r"tokenizer\.json is a symbolic link to /no/x, which is not there"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    shutil.copy(PYDOC / "tokenizer.json", tmp_path)
    monkeypatch.setattr(quire.text.files, "MAX_FILE_BYTES", 1000)
    with pytest.raises(ModelError, match="larger than 1,000 bytes"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").symlink_to("/dev/zero")
    with pytest.raises(ModelError, match="larger than 1,000 bytes"):
        Tokenizer.from_folder(tmp_path)
