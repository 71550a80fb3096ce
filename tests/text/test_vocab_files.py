"""Tokenizers from SentencePiece models and tiktoken files: equal to those libraries on nasty texts."""

from __future__ import annotations

import base64
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Regex, pre_tokenizers

from quire.core.errors import ModelError
from quire.gguf.vocab import CONTROL, UNKNOWN, Vocab
from quire.text.gguf_tokenizer import PRE, build
from quire.text.tokenizer import Tokenizer
from sentencepiece_models import TEXTS, corpus, sentencepiece_model


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("plain", [True, False])
def test_sentencepiece(kind: str, plain: bool, tmp_path: Path) -> None:
    """`plain`: texts are not normalized, as in the models of Llama and Gemma; otherwise NFKC and single spaces."""
    options: dict[str, object] = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    raw = sentencepiece_model(tmp_path, kind, **(options if plain else {}))
    oracle = sys.modules["sentencepiece"].SentencePieceProcessor(model_proto=raw)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.vocab_size == oracle.vocab_size()
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == oracle.encode(text), text
        assert tokenizer.decode(ids) == oracle.decode(ids), text
    assert tokenizer.encode("a")[0] == tokenizer.bos_id == oracle.bos_id() and tokenizer.eos_id == oracle.eos_id()


def test_sentencepiece_beside_a_config(tmp_path: Path) -> None:
    raw = sentencepiece_model(tmp_path, "bpe", normalization_rule_name="identity", remove_extra_whitespaces=False)
    oracle = sys.modules["sentencepiece"].SentencePieceProcessor(model_proto=raw)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"add_bos_token": false, "add_eos_token": true, "eos_token": "<|end|>", '
        '"added_tokens_decoder": {"360": {"content": "<|end|>", "special": true}}}'
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("the fox") == [*oracle.encode("the fox"), 360] and tokenizer.eos_id == 360
    assert tokenizer.encode("<|user|>the")[:1] != oracle.encode("the")[:1]


def ranks() -> dict[bytes, int]:
    """Byte-pair ranks learnt from the corpus, word by word."""
    found = {bytes([b]): b for b in range(256)}
    cut = pre_tokenizers.Split(Regex(PRE["llama3"][0]), "isolated")
    words = [[bytes([b]) for b in word.encode()] for text in corpus() for word, _ in cut.pre_tokenize_str(text)]
    while len(found) < 400:
        counts: dict[tuple[bytes, bytes], int] = {}
        for word in words:
            for pair in pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        left, right = max(counts, key=counts.__getitem__)
        found[left + right] = len(found)
        for word in words:
            for i in range(len(word) - 2, -1, -1):
                if word[i : i + 2] == [left, right]:
                    word[i : i + 2] = [left + right]
    return found


def tiktoken_file(path: Path, found: dict[bytes, int]) -> None:
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in found.items())
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize("name", ["tokenizer.model", "qwen.tiktoken"])
def test_tiktoken(name: str, tmp_path: Path) -> None:
    library = pytest.importorskip("tiktoken", reason="tiktoken is in the dev extra")
    found = ranks()
    tiktoken_file(tmp_path / name, found)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"added_tokens_decoder": {"400": {"content": "<|end|>", "special": true}}, "eos_token": "<|end|>"}'
    )
    oracle = library.Encoding("tiny", pat_str=PRE["llama3"][0], mergeable_ranks=found, special_tokens={"<|end|>": 400})
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text in [*TEXTS, "the fox<|end|> jumps"]:
        ids = tokenizer.encode(text)
        assert ids == oracle.encode(text, allowed_special="all"), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == oracle.decode(ids), text
    assert tokenizer.eos_id == 400


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", None)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>")
    with pytest.raises(ModelError, match=r"tokenizer\.model: needs .*pip install 'quire\[sentencepiece\]'"):
        Tokenizer.from_folder(tmp_path)


def test_files_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing, and so are tokenizer\.model"):
        Tokenizer.from_folder(tmp_path)
    path, found = tmp_path / "tokenizer.model", {bytes([b]): b for b in range(256)}
    for damaged, message in ((found | {b"ab": 300}, "ranks are not"), ({b"a": 0, b"b": 1}, "the byte 0")):
        tiktoken_file(path, damaged)
        with pytest.raises(ModelError, match=message):
            Tokenizer.from_folder(tmp_path)
    path.write_bytes(b"IQ== 0\nnothing\n")
    with pytest.raises(ModelError, match="line 2"):
        Tokenizer.from_folder(tmp_path)
    sentencepiece_model(tmp_path, "word")
    with pytest.raises(ModelError, match="by words"):
        Tokenizer.from_folder(tmp_path)
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(ModelError, match=r"tokenizer\.model: is neither"):
        Tokenizer.from_folder(tmp_path)


def test_tokens_around_a_text_may_be_called_anything() -> None:
    """Found by damaged files: a template of the tokenizers library reads "<s:0>" as a name and a number."""
    for bos, eos in (("<s:0>", "</s:>"), ("$A", "$"), ("<s>", "<s>")):
        vocab = Vocab(
            kind="spm", pre="default", tokens=["<unk>", bos, "\u2581", "a", *([eos] if eos != bos else [])],
            types=[UNKNOWN, CONTROL, 1, 1, *([CONTROL] if eos != bos else [])], scores=[0.0] * (5 if eos != bos else 4),
            merges=[], named={"unk_token": 0, "bos_token": 1, "eos_token": 4 if eos != bos else 1}, ends=(),
            add_bos=True, add_eos=True, add_space_prefix=True,
        )  # fmt: skip
        backend, named = build(vocab, Path("x.gguf"))
        assert backend.encode("aa").ids == [1, 2, 3, 3, vocab.named["eos_token"]]
        assert (named["bos_token"], named["eos_token"]) == (bos, eos)
