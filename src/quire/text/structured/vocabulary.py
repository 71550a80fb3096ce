"""A model's vocabulary as llguidance takes it, and the other way: bytes as few of its tokens."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection
from functools import cached_property
from threading import Lock

from llguidance import LLTokenizer, TokenizerWrapper

from quire.text.structured.completion_search import ByteTokens, token_name
from quire.text.tokenizer import Tokenizer

LONGEST = 32
"""Bytes of a token that completions are spelled with; longer ones are runs of spaces and of signs."""


_NUMBERS = itertools.count()


class Vocabulary:
    """What a tokenizer's tokens spell; `special` names those that no text does. Safe to share between threads.

    `size`: ids of the model, of which the tokenizer may lack some. One more, `end`, stands for the end of a text, as
    which tokens these are differs from request to request. `number`: no other vocabulary of this process has it.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.size = self.end = size
        self.number = next(_NUMBERS)
        self.special = dict(sorted(tokenizer.special.items()))
        hidden = set(self.special.values())
        spelled = (b"" if i in hidden else tokenizer.id_to_bytes(i) for i in range(size))
        self._tokens: list[bytes] = list(spelled)
        self._ids = {piece: i for i, piece in reversed(list(enumerate(self._tokens))) if 0 < len(piece) <= LONGEST}
        self._single = {piece[0]: i for piece, i in self._ids.items() if len(piece) == 1}
        self._numbers = {256 + place: i for place, i in enumerate(self.special.values())}
        self._bytes = {i: byte for byte, i in self._numbers.items()}
        self._lock = Lock()

    @property
    def tokenizer(self) -> LLTokenizer:
        """Tokenizer of the tokens, as llguidance reads them; made when first asked for, in a third of a second for
        128,000."""
        with self._lock:
            return self._tokenizer

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        names = {i: token_name(name).encode() for name, i in self.special.items() if i < self.size}
        tokens = [names.get(i, piece) for i, piece in enumerate(self._tokens)]
        plain = ByteTokens([*tokens, b"<the end>"], [*names, self.end], self.end)
        return LLTokenizer(TokenizerWrapper(plain), n_vocab=self.size + 1, eos_token=self.end)

    def spelled(self, token: int) -> list[int]:
        """Byte tokens (`byte_tokenizer` of `special`) of a token."""
        return [self._bytes[token]] if token in self._bytes else list(self._tokens[token])

    def usable(self, ends: Collection[int] = ()) -> frozenset[int]:
        """Bytes that a token spells which is none of `ends`: of these any text can be made."""
        return frozenset(byte for byte, token in self._single.items() if token not in ends)

    def fewest(self, spelled: list[int], ends: Collection[int] = ()) -> list[int] | None:
        """The fewest tokens but `ends` for these byte tokens; None where there are none. O(LONGEST) a byte."""
        count = len(spelled)
        best: list[tuple[int, int, int]] = [(0, -1, 0)] + [(1 << 30, -1, 0)] * count  # tokens, the last one, its size
        data = bytes(b if b < 256 else 0xFF for b in spelled)  # no token has this byte
        for at in range(count):
            cost = best[at][0] + 1
            if cost > 1 << 29:
                continue
            if (number := spelled[at]) >= 256:
                best[at + 1] = min(best[at + 1], (cost, self._numbers[number], 1))
                continue
            for size in range(1, min(LONGEST, count - at) + 1):
                token = self._ids.get(data[at : at + size])
                if token is not None and cost < best[at + size][0] and token not in ends:
                    best[at + size] = (cost, token, size)
        if best[count][0] >= 1 << 29:
            return None
        tokens, at = list[int](), count
        while at:
            tokens.append(best[at][1])
            at -= best[at][2]
        return tokens[::-1]


_KNOWN: weakref.WeakKeyDictionary[Tokenizer, Vocabulary] = weakref.WeakKeyDictionary()
_MAKING = Lock()


def vocabulary_of(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """Vocabulary of a tokenizer and a model of `size` ids; made once."""
    with _MAKING:
        found = _KNOWN.get(tokenizer)
        if found is None or found.size != size:
            found = _KNOWN[tokenizer] = Vocabulary(tokenizer, size)
        return found
