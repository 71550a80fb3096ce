"""Small SentencePiece models, trained here."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest

TEXTS = [
    "Hello, world", "a", " a", "a  b   c ", "  two", "it's I'LL don't", "3.14159 1,000,000 0x1F",
    "line\nbreak\n\n\ttab\r\n",
    "\u00c4rger \u0130stanbul a\u0301 \ufb01 \u212b", "\u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093\u306b\u3061\u306f",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "\U0001f600\u200d\U0001f469 \u00a0\u2003x", "!!!???...---===",
    "the quick brown fox jumps over the lazy dog", "def f(x):\n    return x**2  # ok", "\x01\x7f", "x" * 100, "",
]  # fmt: skip


def corpus() -> list[str]:
    rng = random.Random(0)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "then", "returns", "home", "within"]
    return [" ".join(rng.choices(words, k=12)) for _ in range(300)] + TEXTS[:12]


def sentencepiece_model(folder: Path, kind: str, **options: object) -> bytes:
    library = pytest.importorskip("sentencepiece", reason="the sentencepiece extra is not installed")
    pytest.importorskip("google.protobuf", reason="the sentencepiece extra is not installed")
    out = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()), model_writer=out, model_type=kind, vocab_size=360,
        byte_fallback=True, character_coverage=0.995, minloglevel=2, num_threads=1, hard_vocab_limit=False,
        user_defined_symbols=["<|user|>"], **options,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(out.getvalue())
    return out.getvalue()
