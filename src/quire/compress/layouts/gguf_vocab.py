"""The vocabulary of a model folder as GGUF metadata: the inverse of `quire.gguf.vocab` and `quire.text.gguf_tokenizer`.

A tokenizer is written only if what is read back cuts nasty texts as it does: GGUF names one of a list of ways to cut
text into words, and has no place for others.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from quire.core.errors import ConfigError
from quire.gguf.vocab import BYTE, CONTROL, KINDS, NORMAL, ROLES, SCORED, UNKNOWN, UNUSED, USER_DEFINED, Vocab
from quire.model.disk.hf_config import read_json
from quire.text.gguf_tokenizer import INSIDE, SPACE, build
from quire.text.gguf_words import PRE, WHOLE_WORDS
from quire.text.template import read_templates
from quire.text.tokenizer import Tokenizer
from quire.text.word_files import find_word_file, read_word_file

TEXTS = (
    "Hello, world", " a  b   c ", "it's I'LL don't WE'VE", "3.14159 1,000,000 0x1F 12 1234567",
    "line\nbreak\n\n\ttab\r\n  x", "\u00c4rger \u0130stanbul \u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093\uac00\ub098",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f600\u200d\U0001f469 \u2003x", "!!!???...---=== $+<=>^~|` (a)[b]{c} #d @e/f\\g",
    "HelloWorld camelCase x2y", "def f(x):\n    return x**2  # ok", "\x01\x7f",
)  # fmt: skip
"""Texts on which the ways to cut text differ."""
TYPES = {"BPE": "", "Unigram": "unigram", "WordPiece": "wordpiece"}
"""Models of tokenizer.json, and GGUF's kinds, of which BPE is two."""
NO_PIECE = -10000.0
"""The score of what is no piece of text."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def vocabulary(folder: Path, size: int, bos: int | None, ends: tuple[int, ...]) -> dict[str, Any]:
    """Return metadata of the tokenizer of `folder` for a model of `size` rows; `bos` and `ends`: ids as its config has
    them.

    `ConfigError` for a tokenizer that GGUF cannot hold, or none.
    """
    path = folder / "tokenizer.json"
    words = None if path.is_file() else find_word_file(folder)
    if not path.is_file() and words is None:
        raise ConfigError(f"{path} is missing: a GGUF file carries its vocabulary; save the tokenizer with the model")
    raw, tokenizer = read_json(path) if words is None else _made_of(words), Tokenizer.from_folder(folder)
    model = raw.get("model") or {}
    if model.get("type") not in TYPES:
        raise _refused(path, f"is of type {model.get('type')}, only BPE, Unigram and WordPiece can be written")
    if tokenizer.vocab_size > size:
        raise _refused(path, f"has ids up to {tokenizer.vocab_size - 1}, the model has {size} rows")
    tokens, types = _tokens(raw, tokenizer, size)
    unknown = _unknown(model)
    texts = ({"unk_token": unknown} if unknown else {}) | tokenizer.named
    named = {role: i for role, text in texts.items() if (i := tokenizer.token_to_id(text)) is not None}
    named |= {} if bos is None else {"bos_token": bos}
    named |= dict(zip(("eos_token", "eot_token", "eom_token"), ends, strict=False))
    bare, around = (tokenizer.encode(TEXTS[0], add_special_tokens=special) for special in (False, True))
    start = next((i for i in range(len(around)) if around[i : i + len(bare)] == bare), 0)
    kind = TYPES[model["type"]] or ("bpe" if tokenizer.byte_level else "spm")
    if len(around) > len(bare):  # which a config need not name
        named |= _ends_of(kind, around, start, len(bare))
    if kind == "wordpiece":
        tokens, types = _marked(tokens, types)
    vocab = Vocab(
        kind=kind,
        pre="default",
        tokens=tokens,
        types=types,
        scores=_scores(model, tokens) if kind in SCORED else [0.0] * size,
        merges=_merges(model) if kind == "bpe" else [],
        named=named,
        ends=ends,
        add_bos=start > 0 or kind == "wordpiece",
        add_eos=len(around) > start + len(bare) or kind == "wordpiece",
        add_space_prefix=False,
        charsmap=_charsmap(raw.get("normalizer") or {}),
    )
    vocab = _fitting(vocab, raw, tokenizer, path)
    return _metadata(vocab) | _templates(folder)


def _made_of(words: Path) -> dict[str, Any]:
    """What tokenizer.json would say of a vocabulary and its merges."""
    config = words.parent / "tokenizer_config.json"
    backend, _ = read_word_file(words, read_json(config) if config.is_file() else {})
    made: dict[str, Any] = json.loads(backend.to_str())
    return made


def _refused(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"{path}: the tokenizer {reason}, which GGUF cannot hold; keep the folder beside another layout")


def _tokens(raw: Mapping[str, Any], tokenizer: Tokenizer, size: int) -> tuple[list[str], list[int]]:
    """Every token and its type; ids that have none are padding."""
    tokens, types = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    own, unknown = _own(raw["model"]), tokenizer.named.get("unk_token") or _unknown(raw["model"])
    added = {token.get("content") for token in raw.get("added_tokens") or ()}
    for token, i in tokenizer.table.items():
        tokens[i] = token
        if token == unknown and not tokenizer.byte_level:
            types[i] = UNKNOWN
        elif token in tokenizer.special:
            types[i] = CONTROL
        elif token in added or token not in own:
            types[i] = USER_DEFINED
        else:
            types[i] = BYTE if not tokenizer.byte_level and _BYTE.fullmatch(token) else NORMAL
    return tokens, types


def _ends_of(kind: str, around: list[int], start: int, count: int) -> dict[str, int]:
    """The tokens that stand around `count` of a text from `start` on, by their roles."""
    first, last = ("cls_token", "sep_token") if kind == "wordpiece" else ("bos_token", "eos_token")
    found = {first: around[start - 1], "bos_token": around[start - 1]} if start else {}
    return found | (
        {last: around[start + count], "eos_token": around[start + count]} if len(around) > start + count else {}
    )


def _marked(tokens: list[str], types: list[int]) -> tuple[list[str], list[int]]:
    """Pieces as files of WordPiece have them: those are marked that begin a word."""
    types = [CONTROL if kind == UNKNOWN else kind for kind in types]
    marked = [
        token if kind == CONTROL else token.removeprefix(INSIDE) if token.startswith(INSIDE) else SPACE + token
        for token, kind in zip(tokens, types, strict=True)
    ]
    return marked, types


def _own(model: Mapping[str, Any]) -> dict[str, Any]:
    """The vocabulary, with ids or with scores."""
    own = model.get("vocab") or {}
    return own if isinstance(own, dict) else dict(own)


def _unknown(model: Mapping[str, Any]) -> str:
    """The token of text that has none, "" where there is no such token."""
    if model.get("unk_id") is not None:
        return str(model["vocab"][model["unk_id"]][0])
    return str(model.get("unk_token") or "")


def _charsmap(normalizer: Mapping[str, Any]) -> bytes:
    """What characters are replaced by, as SentencePiece compiles it."""
    parts = normalizer.get("normalizers") or [normalizer]
    found = next((part["precompiled_charsmap"] for part in parts if part.get("precompiled_charsmap")), "")
    return base64.b64decode(found)


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs of tokens; older files have them as one text with a space between."""
    found = []
    for entry in model.get("merges") or ():
        left, right = entry.split(" ", 1) if isinstance(entry, str) else entry
        found.append((left, right))
    return found


def _scores(model: Mapping[str, Any], tokens: list[str]) -> list[float]:
    """SentencePiece's scores; of merges tokenizer.json has the order alone, that in which pieces are made by them."""
    if model["type"] == "Unigram":
        own = _own(model)
        return [float(own.get(token, NO_PIECE)) for token in tokens]
    ranks: dict[str, int] = {}
    for left, right in _merges(model):
        ranks.setdefault(left + right, len(ranks) + 1)
    return [-float(ranks.get(token, 0)) for token in tokens]


def _fitting(vocab: Vocab, raw: Mapping[str, Any], tokenizer: Tokenizer, path: Path) -> Vocab:
    """The vocabulary with the way to cut text that gives the tokenizer's ids."""
    changes: list[dict[str, Any]]
    if vocab.kind == "wordpiece":
        changes = [{"lowercase": low, "strip_accents": bare} for low in (True, False) for bare in (low, not low)]
    elif vocab.kind == "bpe":
        whole = bool(raw["model"].get("ignore_merges"))
        changes = [{"pre": name} for name in _same_words(raw) if (name in WHOLE_WORDS) == whole]
    else:
        merged = (True, False) if vocab.kind == "unigram" else (False,)
        changes = [{"add_space_prefix": put, "merge_spaces": one} for put in (True, False) for one in merged]
    for change in changes:
        fitting = Vocab(**{**vars(vocab), **change})
        backend, _ = build(fitting, path)
        if all(backend.encode(text).ids == tokenizer.encode(text) for text in TEXTS):
            return _with_pairs(fitting, tokenizer, path)
    raise _refused(path, f"cuts text in a way of its own, known are {', '.join(PRE)}" if vocab.kind == "bpe" else
                   "gives other tokens than its pieces by their scores")  # fmt: skip


def _with_pairs(vocab: Vocab, tokenizer: Tokenizer, path: Path) -> Vocab:
    """The vocabulary that joins pairs of texts as the tokenizer does, if one does."""
    for add in (False, True):
        fitting = Vocab(**{**vars(vocab), "add_sep": add})
        if build(fitting, path)[0].encode(*TEXTS[:2]).ids == tokenizer.encode_pair(*TEXTS[:2])[0]:
            return fitting
    return vocab


def _same_words(raw: Mapping[str, Any]) -> list[str]:
    """The known ways that cut the texts into the same words as tokenizer.json does."""
    cut = tokenizers.Tokenizer.from_str(json.dumps(raw)).pre_tokenizer
    if cut is None:
        return []
    want = [cut.pre_tokenize_str(text) for text in TEXTS]
    found = []
    for name in PRE:
        empty = Vocab("bpe", name, ["a"], [NORMAL], [0.0], [], {}, (), False, False, False)
        own = build(empty, Path("tokenizer.json"))[0].pre_tokenizer
        if [own.pre_tokenize_str(text) for text in TEXTS] == want:
            found.append(name)
    return found


def _metadata(vocab: Vocab) -> dict[str, Any]:
    """The vocabulary under GGUF's keys."""
    model = next(name for name, kind in KINDS.items() if kind == vocab.kind)
    found: dict[str, Any] = {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": vocab.pre,
        "tokenizer.ggml.tokens": vocab.tokens,
        "tokenizer.ggml.token_type": np.array(vocab.types, "<i4"),
        "tokenizer.ggml.add_bos_token": vocab.add_bos,
        "tokenizer.ggml.add_eos_token": vocab.add_eos,
        **({"tokenizer.ggml.add_sep_token": True} if vocab.add_sep else {}),
        "tokenizer.ggml.add_space_prefix": vocab.add_space_prefix,
    }
    if vocab.kind == "bpe":
        found["tokenizer.ggml.merges"] = [f"{left} {right}" for left, right in vocab.merges]
    elif vocab.kind in SCORED:
        found["tokenizer.ggml.scores"] = np.array(vocab.scores, "<f4")
    else:
        own = {"lowercase": vocab.lowercase, "strip_accents": vocab.strip_accents}
        found |= {f"tokenizer.ggml.normalizer.{name}": on for name, on in own.items()}
    if vocab.kind == "unigram":
        found["tokenizer.ggml.remove_extra_whitespaces"] = vocab.merge_spaces
        found |= {"tokenizer.ggml.precompiled_charsmap": np.frombuffer(vocab.charsmap, "u1")} if vocab.charsmap else {}
    return found | {f"tokenizer.ggml.{ROLES[role]}_token_id": i for role, i in vocab.named.items()}


def _templates(folder: Path) -> dict[str, str]:
    """The chat templates of the folder."""
    named = read_templates(folder)[0]
    return {"tokenizer.chat_template" + ("" if name == "default" else f".{name}"): text for name, text in named.items()}
