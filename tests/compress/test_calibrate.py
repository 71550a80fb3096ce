"""Calibration rows: from which text they are, that they are the same again, and what is said of files of garbage."""

from __future__ import annotations

import json
import os
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from quire.bench.quality import general_heldout, heldout_texts, read_questions, shipped
from quire.compress.calibration.text import CalibrationRows, calibration_rows, library_texts, read_documents
from quire.compress.recipes.parser import Calibration
from quire.core.errors import ConfigError
from quire.model.disk.checkpoint import EMBEDDED
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from tiny_model import write_tiny


def rows_of(folder: Path, **asked: Any) -> CalibrationRows:
    tokenizer = Tokenizer.from_folder(folder)
    return calibration_rows(Calibration(**asked), tokenizer, ChatTemplate.from_folder(folder, tokenizer))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokens are bytes."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def beginning(folder: Path) -> Path:
    """The same, with a token before every text."""
    path = write_tiny(folder) / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.post_processor = TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 3)])
    backend.save(str(path))
    return folder


def test_rows_are_the_text_in_order(tiny: Path, tmp_path: Path) -> None:
    """A text of one piece is cut into rows as it is."""
    text = "".join(chr(97 + i % 26) for i in range(100))
    (tmp_path / "a.txt").write_text(text)
    found = rows_of(tiny, files=(str(tmp_path / "a.txt"),), samples=6, length=16)
    ids = Tokenizer.from_folder(tiny).encode(text)
    assert found.tokens == tuple(tuple(ids[at : at + 16]) for at in range(0, 96, 16))
    with pytest.raises(ConfigError, match=r"a.txt: 6 rows of 16 tokens are there, samples = 7 are asked for"):
        rows_of(tiny, files=(str(tmp_path / "a.txt"),), samples=7, length=16)


def test_every_token_is_there_once(tiny: Path, tmp_path: Path) -> None:
    """Pieces of several files in an order of the seed: nothing is lost, nothing twice."""
    parts = [os.urandom(600).hex() for _ in range(3)]
    for i, part in enumerate(parts):
        (tmp_path / f"{i}.txt").write_text(part)
    files = tuple(str(tmp_path / f"{i}.txt") for i in range(3))
    asked: dict[str, Any] = {"files": files, "samples": 225, "length": 16}
    found = rows_of(tiny, **asked)
    tokenizer = Tokenizer.from_folder(tiny)
    text = "".join(tokenizer.decode(list(row)) for row in found.tokens)
    pieces = [part[at : at + 128] for part in parts for at in range(0, 1200, 128)]
    assert sorted(text) == sorted("".join(parts)) and all(piece in text for piece in pieces)
    assert text != "".join(parts) and rows_of(tiny, **asked) == found
    other = rows_of(tiny, **asked, seed=1)
    assert other.tokens != found.tokens and other.digest != found.digest


def test_a_row_begins_as_a_text_does(tmp_path: Path) -> None:
    folder = beginning(tmp_path / "model")
    (tmp_path / "a.txt").write_text("abcdefgh" * 10)
    found = rows_of(folder, files=(str(tmp_path / "a.txt"),), samples=4, length=17)
    text = Tokenizer.from_folder(folder).encode("abcdefgh" * 8)
    assert text[0] == 3
    assert found.tokens == tuple((3, *text[1 + at : 17 + at]) for at in range(0, 64, 16))


def test_lines_are_texts_pairs_or_conversations(tiny: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "v"}]
    rows = [{"text": "one"}, {"prompt": "p", "completion": "q"}, {"messages": chat, "id": 7}]
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    told = [(d.text, list(d.messages)) for d in read_documents(path)]
    assert told == [("one", []), ("pq", []), ("", chat)]
    pair = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "q"}]
    assert list(read_documents(path, chat=True)[1].messages) == pair
    found = rows_of(tiny, files=(str(path),), samples=1, length=11)
    text = Tokenizer.from_folder(tiny).decode(list(found.tokens[0]), skip_special_tokens=False)
    parts = ("one", "pq", "<|user|>u<|end|><|assistant|>v<|end|>")
    assert text in map("".join, permutations(parts))


def test_the_text_of_the_embedded_model(tmp_path: Path) -> None:
    """Sources and questions in turns, in the model's own words; nothing that quality is measured on."""
    found = rows_of(EMBEDDED, text="python", samples=32, length=64)
    assert len(found.tokens) == 32 and {len(row) for row in found.tokens} == {64}
    assert found == rows_of(EMBEDDED, text="python", samples=32, length=64)
    tokenizer = Tokenizer.from_folder(EMBEDDED)
    texts = [tokenizer.decode(list(row), skip_special_tokens=False) for row in found.tokens]
    asked = [text for text in texts if "<|assistant|>" in text]
    assert asked == texts[1::2]
    answers = {q.answer for q in read_questions(EMBEDDED)}
    whole = [
        part.split("<|end|>")[0] for text in asked for part in text.split("<|assistant|>")[1:] if "<|end|>" in part
    ]
    assert len(whole) > 16 and answers.issuperset(whole)
    names = {Path(d.place).stem for d in library_texts()}
    assert "argparse" in names and not names & set(heldout_texts(EMBEDDED))
    plain = rows_of(write_tiny(tmp_path / "plain", chat=False), text="python", samples=4, length=64)
    assert len(plain.tokens) == 4, "a model without a template is told questions as text"


def test_the_text_that_is_shipped(tiny: Path) -> None:
    """It is of several domains and languages, in turns, as much as the default asks for, and none is measured on."""
    found = rows_of(tiny, samples=32, length=64)
    assert found.tokens == rows_of(tiny, samples=32, length=64).tokens
    tokenizer = Tokenizer.from_folder(tiny)
    texts = [tokenizer.decode(list(row)) for row in found.tokens]
    assert sum(text.isascii() for text in texts) < len(texts) - 4, "languages of other letters"
    assert str(found).startswith("quire's general text") and "2,048 tokens" in str(found)
    domains = {name.partition(":")[0] for name, _ in shipped("calibration.jsonl")}
    assert {"novel", "science", "rights", "code"} <= domains
    assert sum(len(text.encode()) for _, text in shipped("calibration.jsonl")) > 256 * 512 * 5
    told = "".join(text for _, text in shipped("calibration.jsonl"))
    for name, text in general_heldout().items():
        parts = [text[at : at + 200] for at in range(0, len(text) - 200, 200)]
        assert len(parts) > 50 and not any(part in told for part in parts), name


def test_rows_of_other_seeds_are_of_other_text() -> None:
    tokens = [rows_of(EMBEDDED, samples=8, length=64, seed=seed).tokens for seed in range(3)]
    assert all(not set(a) & set(b) for a, b in pairwise(tokens))


GARBAGE: dict[str, tuple[str, bytes, str]] = {
    "binary": ("a.txt", b"ab\xff\xfe", "a.txt: is not UTF-8 text at byte 2$"),
    "zero": ("a.txt", b"abc\0def", "a.txt: is not text: a zero byte at character 3$"),
    "empty": ("a.txt", b"", "a.txt: holds no text$"),
    "spaces": ("a.jsonl", b" \n\n ", "a.jsonl: holds no text$"),
    "json": ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl:2: not JSON: "),
    "deep": ("a.jsonl", b"[" * 100000, "a.jsonl:1: not JSON: "),
    "list": ("a.jsonl", b"[1]", "a.jsonl:1: an object with text, prompt and completion, or messages is needed$"),
    "half": ("a.jsonl", b'{"prompt": "a"}', "a.jsonl:1: an object with text"),
    "type": ("a.jsonl", b'\n{"text": 3}', "a.jsonl:2: an object with text"),
    "messages": ("a.jsonl", b'{"messages": [3]}', "a.jsonl:1: an object with text"),
    "role": (
        "a.jsonl",
        b'{"messages": [{"role": "king", "content": "x"}]}',
        "a.jsonl:1: .*role: must be one of",
    ),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_one_line(kind: str, tiny: Path, tmp_path: Path) -> None:
    name, data, reason = GARBAGE[kind]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=reason) as found:
        rows_of(tiny, files=(str(tmp_path / name),), samples=1, length=8)
    assert "\n" not in str(found.value) and len(str(found.value)) < 400


def test_what_is_no_file_or_has_no_template(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "plain", chat=False)
    for path, reason in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=reason):
            rows_of(folder, files=(str(path),))
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}')
    with pytest.raises(ConfigError, match=r"a.jsonl:1: messages need a chat template, which this model has not"):
        rows_of(folder, files=(str(tmp_path / "a.jsonl"),))
