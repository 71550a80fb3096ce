"""Tokenizers of strangers: what lets texts grow without measure is refused by name, what takes long is bounded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import BadRequest, ModelError
from quire.text.tokenizer import Tokenizer
from tiny_model import write_tiny

DOUBLES = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"


def sequence(kind: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "Sequence", kind: steps}


def split(pattern: str) -> dict[str, Any]:
    """What cuts by an expression, then bytes."""
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return sequence("pretokenizers", [cut, level])


def folder_with(path: Path, **parts: Any) -> Path:
    """A model folder whose tokenizer.json has other parts."""
    folder = write_tiny(path)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | parts))
    return folder


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
AROUND = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {},
}
DECODES = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BOMBS: dict[str, tuple[str, dict[str, Any]]] = {
    "a normalizer that doubles": ("normalizer.normalizers[10]", sequence("normalizers", [DOUBLES] * 30)),
    "one within others": (
        "normalizer.normalizers[1].normalizers[0]",
        sequence("normalizers", [DOUBLES | {"content": "a" * 900}, sequence("normalizers", [DOUBLES])]),
    ),
    "an expression that puts much between characters": (
        "normalizer",
        {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 5000},
    ),
    "prepended texts": (
        "normalizer.normalizers[",
        sequence("normalizers", [{"type": "Prepend", "prepend": "a" * 5000}, DOUBLES] * 20),
    ),
    "many steps": ("normalizer.normalizers[256]", sequence("normalizers", [{"type": "NFC"}] * 1000)),
    "bytes of bytes": ("pre_tokenizer.pretokenizers[10]", sequence("pretokenizers", [BYTES] * 30)),
    "templates of templates": ("post_processor.processors[4]", sequence("processors", [AROUND] * 30)),
    "a decoder that doubles": ("decoder.decoders[6]", sequence("decoders", [DECODES] * 30)),
    "a decoder whose expression backtracks": (
        "decoder",
        {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""},
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_lets_texts_grow_is_refused_by_file_and_part(name: str, tmp_path: Path) -> None:
    part, value = BOMBS[name]
    folder = folder_with(tmp_path, **{part.split(".")[0].split("[")[0]: value})
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_folder(folder)
    assert "tokenizer.json: " + part in caught.value.message


@pytest.mark.slow
def test_a_server_does_not_start_with_one(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, normalizer=sequence("normalizers", [DOUBLES] * 30))
    command = [sys.executable, "-m", "quire", "serve", str(folder), "--load-format", "dummy", "--port", "0"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 2 and "normalizer.normalizers[10]" in found.stderr + found.stdout


@pytest.mark.parametrize("pattern", [GPT2, LLAMA3, O200K, BLOOM, r"\p{N}", r"\s+", " {2,}"])
def test_expressions_of_published_tokenizers_are_matched_here(pattern: str, tmp_path: Path) -> None:
    assert Tokenizer.from_folder(folder_with(tmp_path, pre_tokenizer=split(pattern))).work(1) == 1


QUADRATIC = [r"\s+$|\S", "(a+)+$|.", r"a*b", r"\s*[\r\n]+", r"(?=a+b)a", "(?:a|ab){9,50}c", "a{1,200}a{1,200}b",
             r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", r"[a&&[b]]+c", "(?<!a+)b"]  # fmt: skip


@pytest.mark.parametrize("pattern", QUADRATIC)
def test_nothing_is_promised_of_others(pattern: str) -> None:
    from quire.text.regex_bounds import is_linear

    assert not is_linear(pattern)


def slow_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder_with(path, pre_tokenizer=split(r"\s+$|\S+|\s")))


def test_a_text_that_takes_for_ever_is_refused_and_others_are_encoded(tmp_path: Path) -> None:
    made = slow_tokenizer(tmp_path)
    with pytest.raises(BadRequest, match=r"pre_tokenizer.pretokenizers\[0\]"):
        made.encode(" " * 60_000 + "x")
    with pytest.raises(BadRequest, match=r"pre_tokenizer.pretokenizers\[0\]"):
        made.offsets(" " * 60_000 + "x")
    text = "what is written, and what is not"
    assert made.decode(made.encode(text)) == text


def test_tokens_are_those_of_the_library(tmp_path: Path) -> None:
    made = slow_tokenizer(tmp_path / "slow")
    plain = Tokenizer.from_folder(folder_with(tmp_path / "plain", pre_tokenizer=BYTES))
    for text in ("", "a b  c\n", "<|user|>héé\u4e2d<|end|>", "\ufdd0 x"):
        for special in (True, False):
            assert made.encode(text, special=special) == plain.encode(text, special=special)
        assert made.offsets(text) == plain.offsets(text)


def test_its_process_is_replaced_when_it_is_killed(tmp_path: Path) -> None:
    made = slow_tokenizer(tmp_path)
    made.encode("a")
    os.kill(made._backend._process._process.pid, signal.SIGKILL)
    with pytest.raises(Exception, match="try again"):
        made.encode("a")
    assert made.encode("a")


def test_a_normal_form_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.text import tokenizer_process

    monkeypatch.setattr(tokenizer_process, "NORMAL_BYTES", 1 << 14)
    grows = sequence("normalizers", [DOUBLES] * 5)
    made = Tokenizer.from_folder(folder_with(tmp_path, normalizer=grows))
    assert len(made.encode("b" * 2000)) == 2000  # it might grow, and does not
    with pytest.raises(BadRequest, match="make it shorter"):
        made.encode("a" * 2000)


SPACE, SIGN = {"String": " "}, "\u2581"
PARTS: list[Callable[[], dict[str, Any]]] = [
    lambda: {"normalizer": sequence("normalizers", [{"type": "Prepend", "prepend": SIGN},
                                                    {"type": "Replace", "pattern": SPACE, "content": SIGN}])},
    lambda: {"normalizer": {"type": "Replace", "pattern": SPACE, "content": SIGN}},
    lambda: {"normalizer": {"type": "NFC"}, "pre_tokenizer": split(LLAMA3)},
    lambda: {"normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                            "strip_accents": None, "lowercase": True}},
    lambda: {"decoder": sequence("decoders", [{"type": "Replace", "pattern": {"String": SIGN}, "content": " "},
                                              {"type": "ByteFallback"}, {"type": "Fuse"},
                                              {"type": "Strip", "content": " ", "start": 1, "stop": 0}])},
]  # fmt: skip


@pytest.mark.parametrize("parts", PARTS, ids=["Llama 2", "Gemma", "Qwen", "BERT", "SentencePiece"])
def test_parts_of_published_tokenizers_load(parts: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    assert Tokenizer.from_folder(folder_with(tmp_path, **parts())).work(1) == 1
