# ruff: noqa: RUF001
"""Tokenizers of every kind, trained on a few texts, and the texts: languages, code, emoji, spaces, special tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from quire.gguf.vocab import CONTROL, UNKNOWN, Vocab
from quire.text.gguf_tokenizer import build
from quire.text.tokenizer import Tokenizer as Ours
from sentencepiece_models import sentencepiece_model
from text_models import PYDOC, sentencepiece_folder

SPACE = "▁"
SPECIAL = ["<s>", "</s>", "<|im_end|>"]
SENTENCES = [
    "hello world, the quick brown fox", "Der Ärger über Öl und Größe", "où est l'été à Noël ?",
    "¿Qué tal, señor?", "Привет, как дела?", "Γειά σου Κόσμε", "你好，世界。今天怎么样", "こんにちは、世界",
    "안녕하세요 세계", "مرحبا بالعالم", "שלום עולם", "नमस्ते दुनिया", "สวัสดีชาวโลก", "Chào thế giới",
    "İstanbul'da çay", "👩‍👩‍👧 and 🙂🏽 ok 🇩🇪", "a\u0301 e\u0308 o\ufe0f",
    "def f(x):\n    if x:\n        return  x\n\treturn None\n", "  leading", "trailing  ", "\n\nnew\r\nlines\n",
    " ", "   ", "x = {'a': [1, 2.5e-3], \"b\": None}  # ok", "a  b   c    d", "don't I'll they've . , ! ?",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ∑ ≠ €", "<s>hello</s> world", "a <|im_end|>\n b", "<|im_end|>", "hi</s><|im_end|> there",
    "\ttab\tbed", "1,234,567 0xFF",
]  # fmt: skip


def texts(count: int = 200) -> list[str]:
    """The sentences, and random joints of two or three of them."""
    rng, made = random.Random(7), list(SENTENCES)
    while len(made) < count:
        parts = [rng.choice(SENTENCES) for _ in range(rng.choice((2, 2, 3)))]
        made.append(rng.choice(("", " ", "\n", "  ")).join(part[: rng.randint(3, 20)] for part in parts))
    return made


def _corpus() -> list[str]:
    return [s for s in SENTENCES if "<" not in s] * 3


def _metaspace(scheme: str) -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(SPACE, prepend_scheme=scheme)])
    tokens = ["<unk>", *(f"<0x{b:02X}>" for b in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=tokens, show_progress=False, limit_alphabet=60)
    backend.train_from_iterator(_corpus(), trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(state))


def _byte_level(prefix: bool) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_corpus(), trainer)
    return backend


def _unigram() -> Tokenizer:
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE)
    backend.decoder = decoders.Metaspace(SPACE)
    trainer = trainers.UnigramTrainer(vocab_size=400, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator(_corpus(), trainer)
    return backend


def _word_piece() -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]"], show_progress=False)
    backend.train_from_iterator(_corpus(), trainer)
    return backend


def _word_ends() -> Tokenizer:
    """BPE that marks the ends of words, as GPT-1 and CLIP do."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder()
    special = ["<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(_corpus(), trainer)
    return backend


def _words() -> Tokenizer:
    """Words, and nothing that decodes."""
    words = sorted({word for text in _corpus() for word in text.split()})
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<unk>", *words])}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def _gguf(kind: str, folder: Path) -> Tokenizer:
    """A vocabulary as a GGUF file has it: of llama's kind or of gpt2's."""
    source = _byte_level(False) if kind == "bpe" else _metaspace("always")
    state = json.loads(source.to_str())["model"]
    tokens = [*sorted(state["vocab"], key=state["vocab"].__getitem__), "<s>", "</s>"]
    bos = len(tokens) - 2
    types = [UNKNOWN if t == "<unk>" else 6 if t.startswith("<0x") else 1 for t in tokens[:-2]] + [CONTROL] * 2
    named = {"bos_token": bos, "eos_token": bos + 1} | ({"unk_token": 0} if kind == "spm" else {})
    merges = [(a, b) for a, b in state["merges"]] if kind == "bpe" else []
    pre, scores = "gpt-2" if kind == "bpe" else "", [-float(i) for i in range(len(tokens))]
    vocab = Vocab(kind, pre, tokens, types, scores, merges, named, (), True, False, kind == "spm")
    return build(vocab, folder)[0]


def _of_folder(write: Callable[[Path], object]) -> Callable[[Path], Ours]:
    def read(folder: Path) -> Ours:
        write(folder)
        return Ours.from_folder(folder)

    return read


def _of_backend(make: Callable[[], Tokenizer]) -> Callable[[Path], Ours]:
    def read(folder: Path) -> Ours:
        backend = make()
        backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
        bos = backend.token_to_id("<s>")
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", bos)])
        return Ours(backend, {"bos_token": "<s>", "eos_token": "</s>"})

    return read


_IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
KINDS: dict[str, Callable[[Path], Ours]] = {
    "converted SentencePiece": _of_folder(sentencepiece_folder),
    "SentencePiece BPE": _of_folder(lambda folder: sentencepiece_model(folder, "bpe", **_IDENTITY)),
    "SentencePiece unigram": _of_folder(lambda folder: sentencepiece_model(folder, "unigram", **_IDENTITY)),
    "SentencePiece NFKC": _of_folder(lambda folder: sentencepiece_model(folder, "unigram")),
    "Metaspace always": _of_backend(lambda: _metaspace("always")),
    "Metaspace first": _of_backend(lambda: _metaspace("first")),
    "Metaspace never": _of_backend(lambda: _metaspace("never")),
    "unigram": _of_backend(_unigram),
    "byte-level": lambda folder: Ours.from_folder(PYDOC),
    "byte-level with a space": _of_backend(lambda: _byte_level(True)),
    "WordPiece": _of_backend(_word_piece),
    "ends of words": _of_backend(_word_ends),
    "words": _of_backend(_words),
    "GGUF llama": _of_backend(lambda: _gguf("spm", Path("llama.gguf"))),
    "GGUF gpt2": _of_backend(lambda: _gguf("bpe", Path("gpt2.gguf"))),
}
"""Name -> what makes one in a folder."""


def made(kind: str, folder: Path) -> Ours:
    """A tokenizer of a kind."""
    if kind.startswith("SentencePiece"):
        pytest.importorskip("sentencepiece", reason="the sentencepiece extra is not installed")
    return KINDS[kind](folder)
