"""How much text one token can stand for, so that a text that is far too long is refused before it is encoded."""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import models

from quire.text.vocab_files import BYTE_OF

_KEEPS = frozenset({"ByteLevel", "Metaspace", "Digits"})
"""Pre-tokenizers that cut a text and lose none of it."""
_COMPOSED = 3
"""Times as many bytes as its composed form (NFC) a text may have: three jamo of a Hangul syllable."""


def most_bytes(backend: tokenizers.Tokenizer) -> int | None:
    """Bytes of a text that one token can stand for at most; None where that has no bound.

    It has one where every byte has a token and nothing drops text: an unknown word or a run of spaces may be one token
    whatever its length.
    """
    model = backend.model
    strips = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    if strips or not isinstance(model, models.BPE):
        return None
    shrinks = _shrinks(state_of(backend.normalizer))
    cuts = _flat(state_of(backend.pre_tokenizer), "pretokenizers")
    if shrinks is None or not all(_keeps(cut) for cut in cuts):
        return None
    table = backend.get_vocab(with_added_tokens=True)
    if any(cut["type"] == "ByteLevel" for cut in cuts):
        complete = all(character in table for character in BYTE_OF)
    else:
        complete = model.byte_fallback and all(f"<0x{byte:02X}>" in table for byte in range(256))
    return shrinks * max(len(token.encode()) for token in table) if complete else None


def state_of(part: Any) -> dict[str, Any]:
    """What a part of a tokenizer is made of."""
    found: dict[str, Any] = {"type": "Sequence"} if part is None else json.loads(part.__getstate__())
    return found


def _flat(state: dict[str, Any], parts: str) -> list[dict[str, Any]]:
    """The steps of a sequence of sequences."""
    if state["type"] != "Sequence":
        return [state]
    return [step for part in state.get(parts, ()) for step in _flat(part, parts)]


def _keeps(cut: dict[str, Any]) -> bool:
    return cut["type"] in _KEEPS or cut.get("behavior", "Removed") != "Removed"


def _shrinks(state: dict[str, Any]) -> int | None:
    """How many times fewer bytes a normalizer may leave; None where it has no bound, or is not known."""
    times = 1
    for step in _flat(state, "normalizers"):
        if step["type"] == "NFC":
            times *= _COMPOSED
        elif step["type"] == "Replace":
            pattern = step["pattern"].get("String", "")
            if not 0 < len(pattern.encode()) <= len(step["content"].encode()):
                return None
        elif step["type"] not in ("Prepend", "ByteLevel"):
            return None
    return times
