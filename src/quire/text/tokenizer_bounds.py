"""What a tokenizer that comes with a model may do to a text: how far it grows, and whether that takes long.

A tokenizer.json is a program: normalizers that write more than they read, one after the other, expressions that match
by backtracking. So before a text is given to one, each of its parts is looked at. What lets texts grow without measure
is refused by name. What cannot be seen to take time in proportion to a text is named too, and texts are then encoded in
a process that the kernel bounds (`quire.text.tokenizer_process`).
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import models

from quire.core.errors import ModelError
from quire.text.bounds import state_of
from quire.text.regex_bounds import is_linear

MOST_GROWTH = 1024
"""Times as long as a text its normal form may be. That of T5 may be 400 times, as far as it is known."""
MOST_DECODED = 64
"""Times as long as a token its text may be."""
MOST_STEPS = 256
"""Steps of a part, each of which reads a whole text."""
MOST_COPIES = 16
"""Times that a text's tokens may be repeated by what puts special tokens around them."""
MOST_AFFIX = 64
"""Bytes that stand before or behind the pieces of a word."""
MOST_WORD = 1000
"""Characters of a word that is looked for in a table piece by piece, which takes the square of them."""
MOST_PIECE = 256
"""Characters of a piece of a unigram model: each place in a text is the beginning of as many."""
_NORMAL_FORMS = {"NFC": 3, "NFD": 4, "NFKC": 11, "NFKD": 11}
"""Times as many bytes as a text has in UTF-8; a form of a form grows no more."""
_GROWS = {"BertNormalizer": 12, "Lowercase": 2, "ByteLevel": 2}
_DECODE_GROWS = {"ByteLevel": 3, "BPEDecoder": 2, "CTC": 2, "WordPiece": 2}


def check_growth(backend: tokenizers.Tokenizer) -> int:
    """Times as many bytes as a text has that it may have when it is cut to tokens, at most.

    `ModelError` naming the part with which that, or what comes out, is without measure.
    """
    most, forms = 1, 1
    for name, step in _steps(backend.normalizer, "normalizer", "normalizers"):
        if step["type"] in _NORMAL_FORMS:
            most //= forms
            forms = max(forms, _NORMAL_FORMS[step["type"]])
            most *= forms
        else:
            most *= _normalizer_growth(step)
        _refuse(most > MOST_GROWTH, name, step, f"lets texts grow {most} times and more")
    for name, step in _steps(backend.pre_tokenizer, "pre_tokenizer", "pretokenizers"):
        most *= _cut_growth(step)
        _refuse(most > MOST_GROWTH, name, step, f"lets texts grow {most} times and more")
    copies = 1
    for name, step in _steps(backend.post_processor, "post_processor", "processors"):
        copies *= max(1, sum("Sequence" in each for each in step.get("single", ())))
        _refuse(copies > MOST_COPIES, name, step, f"repeats texts {copies} times and more")
    _check_decoder(backend)
    _check_model(backend.model)
    return most


def _check_decoder(backend: tokenizers.Tokenizer) -> None:
    """Check a decoder, which works on the tokens that a model writes, one by one and between steps: there it must be
    fast."""
    most = 1
    for name, step in _steps(backend.decoder, "decoder", "decoders"):
        most *= _replacing(step) if step["type"] == "Replace" else _DECODE_GROWS.get(step["type"], 1)
        _refuse(most > MOST_DECODED, name, step, f"lets texts of tokens grow {most} times and more")
        _refuse(not is_linear(_pattern(step)), name, step, "has an expression that may take for ever")


def slow_part(backend: tokenizers.Tokenizer) -> str:
    """The part that is not known to take time in proportion to a text; "": there is none."""
    cuts = (
        *_steps(backend.normalizer, "normalizer", "normalizers"),
        *_steps(backend.pre_tokenizer, "pre_tokenizer", "pretokenizers"),
    )
    for name, step in cuts:
        if not is_linear(_pattern(step)):
            return f"{name} ({step['type']}), by its expression"
    model = backend.model
    if isinstance(model, models.WordPiece) and model.max_input_chars_per_word > MOST_WORD:
        return "model.max_input_chars_per_word"
    if isinstance(model, models.Unigram):
        longest = max(map(len, backend.get_vocab(with_added_tokens=False)), default=0)
        return "model.vocab, by the length of its pieces" if longest > MOST_PIECE else ""
    return ""


def _steps(part: Any, name: str, parts: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The steps of a part, which may be sequences of sequences, each with where it stands in the file."""
    for i, (where, step) in enumerate(_flat(state_of(part), name, parts)):
        _refuse(i >= MOST_STEPS, where, step, f"is one step more than the {MOST_STEPS} there may be")
        yield where, step


def _flat(state: dict[str, Any], name: str, parts: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if state["type"] != "Sequence":
        yield name, state
        return
    for i, step in enumerate(state.get(parts, ())):
        yield from _flat(step, f"{name}.{parts}[{i}]", parts)


def _pattern(step: dict[str, Any]) -> str:
    """The expression of a step; "" where it has none, or a plain text."""
    pattern = step.get("pattern")
    return str(pattern.get("Regex", "")) if isinstance(pattern, dict) else ""


def _normalizer_growth(step: dict[str, Any]) -> int:
    if step["type"] == "Replace":
        return _replacing(step)
    if step["type"] == "Prepend":  # to a whole text, so that most of them grow by little
        return 1 + len(step["prepend"].encode()) // MOST_AFFIX
    if step["type"] == "Precompiled":
        return _longest_form(step.get("precompiled_charsmap", ""))
    return _GROWS.get(step["type"], 1)


def _cut_growth(step: dict[str, Any]) -> int:
    if step["type"] == "Metaspace":
        return 6 if step.get("prepend_scheme") == "always" else 3
    return 2 if step["type"] == "ByteLevel" else 1


def _replacing(step: dict[str, Any]) -> int:
    """Times as long as a text what a `Replace` makes of it may be."""
    size, pattern = len(step["content"].encode()), step["pattern"]
    if found := len(pattern.get("String", "").encode()):
        return max(1, -(-size // found))
    return 1 + size


def _longest_form(table: str) -> int:
    """Bytes of the longest text that a character becomes, by SentencePiece's table: a trie, and texts behind it."""
    data = base64.b64decode(table)
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(1, max(map(len, texts.split(b"\0")), default=1))


def _check_model(model: Any) -> None:
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        size = len((getattr(model, name, None) or "").encode())
        if size > MOST_AFFIX:
            raise ModelError(f"model.{name}: has {size} bytes, of which each piece of a word has as many; at most "
                             f"{MOST_AFFIX} can be")  # fmt: skip


def _refuse(wrong: bool, name: str, step: dict[str, Any], what: str) -> None:
    if wrong:
        raise ModelError(f"{name} ({step['type']}): {what}, with what stands before it; remove it, or give another "
                         "--tokenizer")  # fmt: skip
