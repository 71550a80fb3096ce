"""A tokenizer from the vocabulary of a GGUF file, cutting text as llama.cpp does with the same file.

Byte-level BPE: the file names its pre-tokenizer, whose regular expressions are in PRE. SentencePiece ("llama"): pieces
merge by score, the highest first: BPE whose merges are all ways to make a piece of two others, ranked by score.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from quire.core.errors import ModelError
from quire.gguf.file import GgufFile
from quire.gguf.vocab import CONTROL, UNKNOWN, USER_DEFINED, Vocab, chat_templates, read_vocab
from quire.text.special_tokens import put_around

SPACE = "\u2581"
MAX_SPLIT_WORK = 1 << 30
"""Characters compared to find how pieces are made of pieces; the largest published vocabularies need 2 % of it."""
_CASE = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_CASE}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CASE}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_CASE}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CASE}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CASE}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = (r"\p{N}", _GPT2)
PRE: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "gigachat", "mellum"), (_GPT2,)),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "dbrx", "smaug-bpe",
         "glm4", "chatglm-bpe"),
        (_LLAMA3,),
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "grok-2", "solar-open"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), (_GPT4O,)),
    "tekken": (_TEKKEN,),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"),
    "deepseek-v3": (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3),
}  # fmt: skip
"""`tokenizer.ggml.pre` -> the expressions that cut text into words, applied one after the other."""
WHOLE_WORDS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
                         "tekken", "glm4"})  # fmt: skip
"""Pre-tokenizers whose vocabularies take a word that is a token as it is, whatever its merges give."""


class GgufTokenizer(NamedTuple):
    """What a file holds: a tokenizer of `size` tokens, texts of special ones by role ("bos_token", ...), and chat
    templates by name."""

    backend: tokenizers.Tokenizer
    named: dict[str, str]
    templates: dict[str, str]
    size: int


def read_tokenizer(path: Path) -> GgufTokenizer:
    """The tokenizer of the GGUF file `path`, and what goes with it."""
    file = GgufFile(path)
    vocab = read_vocab(file)
    return GgufTokenizer(*build(vocab, path), chat_templates(file), len(vocab.tokens))


def build(vocab: Vocab, path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer of a vocabulary, and its named special tokens; `ModelError` names the file `path`."""
    try:
        backend = _bpe(vocab, path) if vocab.kind == "bpe" else _sentencepiece(vocab, path)
        _add_tokens(backend, vocab)
    except ModelError:
        raise
    except BaseException as error:  # the Rust library panics on some malformed files, which is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise ModelError(f"{path}: tokenizer.ggml: {error}") from None
    named = {role: vocab.tokens[i] for role, i in vocab.named.items() if role not in ("eot_token", "eom_token")}
    bos, eos = ([(vocab.named[r], named[r])] if r in named else [] for r in ("bos_token", "eos_token"))
    backend.post_processor = put_around(bos if vocab.add_bos else [], eos if vocab.add_eos else [])
    return backend, named


def _bpe(vocab: Vocab, path: Path) -> tokenizers.Tokenizer:
    if vocab.pre not in PRE:
        raise ModelError(
            f"{path}: tokenizer.ggml.pre: {vocab.pre!r} is not known; known: {', '.join(sorted(PRE))}. Give the "
            "original folder as --tokenizer"
        )
    ids = {token: i for i, token in enumerate(vocab.tokens)}
    try:
        model = models.BPE(ids, vocab.merges, ignore_merges=vocab.pre in WHOLE_WORDS)
    except Exception:
        for i, (left, right) in enumerate(vocab.merges):
            if left not in ids or right not in ids or left + right not in ids:
                told = f"entry {i} ({left!r} + {right!r:.40}) makes no token"
                raise ModelError(f"{path}: tokenizer.ggml.merges: {told}") from None
        raise
    backend = tokenizers.Tokenizer(model)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE[vocab.pre]]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocab: Vocab, path: Path) -> tokenizers.Tokenizer:
    if sum(len(t) ** 2 for t in vocab.tokens) > MAX_SPLIT_WORK:
        raise ModelError(f"{path}: tokenizer.ggml.tokens: they are too long to be pieces of words")
    ids = {token: i for i, token in enumerate(vocab.tokens)}
    unknown = vocab.tokens[vocab.named["unk_token"]] if "unk_token" in vocab.named else None
    merges = sorted(_splits(vocab, ids))
    pairs = [(vocab.tokens[left], vocab.tokens[right]) for _, left, right in merges]
    backend = tokenizers.Tokenizer(models.BPE(ids, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = [normalizers.Prepend(SPACE)] if vocab.add_space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if vocab.add_space_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _splits(vocab: Vocab, ids: dict[str, int]) -> Iterator[tuple[float, int, int]]:
    """(-score, left, right) for every way to make a piece of two pieces; control tokens are never made of text."""
    for token, kind, score in zip(vocab.tokens, vocab.types, vocab.scores, strict=True):
        if kind not in (CONTROL, UNKNOWN):
            for at in range(1, len(token)):
                left = ids.get(token[:at])
                right = None if left is None else ids.get(token[at:])
                if left is not None and right is not None:
                    yield -score, left, right


def _add_tokens(backend: tokenizers.Tokenizer, vocab: Vocab) -> None:
    """Control tokens are special; user-defined ones are found in any text before it is cut."""
    special, plain = list[AddedToken](), list[AddedToken]()
    for token, kind in zip(vocab.tokens, vocab.types, strict=True):
        if kind in (CONTROL, UNKNOWN):
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(token, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)
