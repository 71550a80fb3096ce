"""The tokenizer: what other implementations make of the same folder, and text that tries to forge special tokens."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

import quire.core.files
from quire.core.errors import BadRequest, ModelError
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
    monkeypatch.setattr(quire.core.files, "MAX_FILE_BYTES", 1000)
    with pytest.raises(ModelError, match="larger than 1,000 bytes"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").symlink_to("/dev/zero")
    with pytest.raises(ModelError, match="larger than 1,000 bytes"):
        Tokenizer.from_folder(tmp_path)


def test_other_threads_go_on_while_a_text_is_encoded() -> None:
    done = list[float]()

    def encode() -> None:
        began = time.monotonic()
        tokenizer.encode("for item in items: print(item)\n" * 60_000)
        done.append(time.monotonic() - began)

    thread, longest, last = threading.Thread(target=encode), 0.0, time.monotonic()
    thread.start()
    while not done:
        time.sleep(0.001)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    thread.join()
    assert longest < done[0] / 2


def test_panics_of_the_library_are_errors_of_ours() -> None:
    """They are no `Exception`, and would end the process or the connection."""
    backend = Backend(models.BPE({"a": 0, "b": 1}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.FixedLength(0), decoders.Strip("a", 0, 2)
    broken = Tokenizer(backend, {})
    with pytest.raises(BadRequest, match="cannot be encoded"):
        broken.encode("ab")
    with pytest.raises(ModelError, match="cannot decode"):
        broken.decode([0])
    unknown = Tokenizer(Backend(models.BPE({"a": 0}, [], unk_token="<unk>")), {})
    with pytest.raises(BadRequest, match="Unk token"):
        unknown.encode("b")


@given(texts)
def test_a_text_has_at_least_the_tokens_that_its_size_says(text: str) -> None:
    for each in (text, tokenizer.escape(text)):
        assert tokenizer.least_tokens(each) <= len(tokenizer.encode(each))
    assert tokenizer.least_tokens("x" * 86_000) >= 1000


def test_no_size_is_told_where_a_token_may_stand_for_any_text(tmp_path: Path) -> None:
    table = {f"<0x{b:02X}>": b for b in range(256)} | {"<unk>": 256}

    def least(**changes: Any) -> int:
        backend = Backend(models.BPE(changes.pop("table", table), [], byte_fallback=True))
        token = changes.pop("token", None)
        for name, value in changes.items():
            setattr(backend, name, value)
        backend.add_special_tokens([token] if token else [])
        return Tokenizer(backend, {}).least_tokens("x" * 600)

    cut, space = pre_tokenizers.Split(" ", "isolated"), normalizers.Replace(" ", "\u2581")
    assert least() == least(pre_tokenizer=cut) == least(normalizer=space) == 100
    assert least(normalizer=normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.NFC()])) == 34
    assert least(table={"<unk>": 0}) == 0, "unknown characters are left out"
    assert least(token=AddedToken("<|s|>", lstrip=True)) == 0, "it takes all spaces before it"
    for normalizer in (
        normalizers.Strip(),
        normalizers.Replace("ab", "c"),
        normalizers.NFKC(),
        normalizers.Lowercase(),
    ):
        assert least(normalizer=normalizer) == 0
    for pre_tokenizer in (pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Whitespace()):
        assert least(pre_tokenizer=pre_tokenizers.Sequence([cut, pre_tokenizer])) == 0
    assert least(model=models.WordPiece({"<unk>": 0}, unk_token="<unk>")) == 0
    assert Tokenizer.from_folder(sentencepiece_folder(tmp_path)).least_tokens("x" * 800) == 100
