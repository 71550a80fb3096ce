"""A tokenizer from the vocabulary of a GGUF file, cutting text as llama.cpp does with the same file.

Byte-level BPE: the file names its pre-tokenizer (`gguf_words.PRE`); a few have tokens of text instead of bytes.
SentencePiece ("llama"): pieces merge by score, the highest first: BPE whose merges are all ways to make a piece of two
others, ranked by score. Unigrams ("t5"): the pieces whose scores sum to most (Kudo 2018). WordPiece ("bert"): a word is
cut into the longest pieces from its start on; the file marks pieces that begin a word, its tokenizer those that do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from quire.core.errors import ModelError
from quire.gguf.file import GgufFile
from quire.gguf.vocab import CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Vocab, chat_templates, read_vocab
from quire.text.gguf_words import PRE, SPACED, TEXTS, WHOLE_WORDS
from quire.text.special_tokens import put_around

SPACE = "\u2581"
INSIDE = "##"
"""What a piece begins with that does not begin a word."""
CLOSING = {"wordpiece": "sep_token"}
"""Kind -> the role of the token that text ends with, where that is not the end token."""
LONGEST_WORD = 1 << 20
"""Characters of a word that is cut into pieces."""
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
    if vocab.kind == "wordpiece":
        vocab = replace(vocab, tokens=_as_pieces(vocab))
    try:
        backend = MAKERS[vocab.kind](vocab, path)
        _add_tokens(backend, vocab)
    except ModelError:
        raise
    except BaseException as error:  # the Rust library panics on some malformed files, which is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise ModelError(f"{path}: tokenizer.ggml: {error}") from None
    closing = CLOSING.get(vocab.kind, "eos_token")
    named = {role: vocab.tokens[i] for role, i in vocab.named.items() if role not in ("eot_token", "eom_token")}
    bos, eos, sep = ([(vocab.named[r], named[r])] if r in named else [] for r in ("bos_token", closing, "sep_token"))
    between = sep or eos if vocab.add_sep else []
    first, last = bos if vocab.add_bos else [], eos if vocab.add_eos else []
    backend.post_processor = put_around(first, last, between=between, kinds=vocab.kind == "wordpiece")
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


def _unigrams(vocab: Vocab, path: Path) -> tokenizers.Tokenizer:
    """Pieces that text is never made of have the least score of others, which is not below what unknown text counts."""
    if "unk_token" not in vocab.named:
        raise ModelError(f"{path}: tokenizer.ggml.unknown_token_id: is missing; text without a piece needs a token")
    count = next((i for i in range(len(vocab.types), 0, -1) if vocab.types[i - 1] != UNUSED), 0)
    least = min((s for s, kind in zip(vocab.scores, vocab.types, strict=True) if kind == NORMAL), default=0.0)
    scores = [s if kind == NORMAL else least for s, kind in zip(vocab.scores, vocab.types, strict=True)]
    pieces = list(zip(vocab.tokens, scores, strict=True))[:count]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, vocab.named["unk_token"], False))
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(vocab.charsmap)] if vocab.charsmap else []
    if vocab.merge_spaces:
        steps += [normalizers.Replace(Regex(" +"), " "), normalizers.Replace(Regex(r"\A | \z"), "")]
    prefix = vocab.add_space_prefix or vocab.merge_spaces
    alone = normalizers.Replace(Regex(rf"\A{SPACE}(?= +\z)"), "")  # spaces alone get none
    steps += [*([normalizers.Prepend(SPACE), alone] if prefix else []), normalizers.Replace(" ", SPACE)]
    backend.normalizer = normalizers.Sequence(steps)
    if vocab.merge_spaces:  # each begins a word
        backend.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Fuse(), *strip])
    return backend


def _as_pieces(vocab: Vocab) -> list[str]:
    """Tokens as such a tokenizer has them: those are marked that do not begin a word."""
    return [
        token if kind == CONTROL else token[1:] if token.startswith(SPACE) and len(token) > 1 else INSIDE + token
        for token, kind in zip(vocab.tokens, vocab.types, strict=True)
    ]


def _wordpiece(vocab: Vocab, path: Path) -> tokenizers.Tokenizer:
    ids = {token: i for i, token in enumerate(vocab.tokens)}
    unknown = vocab.tokens[vocab.named["unk_token"]] if "unk_token" in vocab.named else ""
    if len(ids) < len(vocab.tokens) or unknown not in ids:
        raise ModelError(f"{path}: tokenizer.ggml.tokens: two are the same piece, or there is none for unknown words")
    model = models.WordPiece(
        ids, unk_token=unknown, max_input_chars_per_word=LONGEST_WORD, continuing_subword_prefix=INSIDE
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=vocab.strip_accents, lowercase=vocab.lowercase
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(INSIDE)
    return backend


MAKERS: dict[str, Callable[[Vocab, Path], tokenizers.Tokenizer]] = {
    "bpe": _bpe,
    "spm": _sentencepiece,
    "unigram": _unigrams,
    "wordpiece": _wordpiece,
}


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
