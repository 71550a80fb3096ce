"""A tokenizer from the vocabulary of a GGUF file, cutting text as llama.cpp does with the same file.

Byte-level BPE: the file names its pre-tokenizer (`gguf_words.PRE`); a few have tokens of text instead of bytes.
SentencePiece ("llama"): pieces merge by score, the highest first: BPE whose merges are all ways to make a piece of two
others, ranked by score.
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
from quire.text.gguf_words import PRE, SPACED, TEXTS, WHOLE_WORDS
from quire.text.special_tokens import put_around

SPACE = "\u2581"
MAX_SPLIT_WORK = 1 << 30
"""Characters compared to find how pieces are made of pieces; the largest published vocabularies need 2 % of it."""


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
        model = _merging(vocab, ids)
    except Exception:
        for i, (left, right) in enumerate(vocab.merges):
            if left not in ids or right not in ids or left + right not in ids:
                told = f"entry {i} ({left!r} + {right!r:.40}) makes no token"
                raise ModelError(f"{path}: tokenizer.ggml.merges: {told}") from None
        raise
    backend = tokenizers.Tokenizer(model)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE[vocab.pre]]
    if vocab.pre in TEXTS:
        spaced = vocab.pre in SPACED
        backend.normalizer = normalizers.Replace(" ", SPACE) if spaced else None
        backend.pre_tokenizer = pre_tokenizers.Sequence(cuts if spaced else [pre_tokenizers.WhitespaceSplit()])
        spaces = [decoders.Replace(SPACE, " ")] if spaced else []
        backend.decoder = decoders.Sequence([*spaces, decoders.ByteFallback(), decoders.Fuse()])
        return backend
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _merging(vocab: Vocab, ids: dict[str, int]) -> models.BPE:
    if vocab.pre not in TEXTS:
        return models.BPE(ids, vocab.merges, ignore_merges=vocab.pre in WHOLE_WORDS)
    made = {left + right for left, right in vocab.merges}
    lines = [token for token in ids if len(token) > 1 and not token.strip("\n") and token not in made]
    whole = [(t[:i], t[i:]) for t in sorted(lines, key=len) for i in range(1, len(t)) if {t[:i], t[i:]} <= ids.keys()]
    return models.BPE(ids, [*vocab.merges, *whole], byte_fallback=True)


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
