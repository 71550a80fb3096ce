"""Requests whose answers follow a grammar, and random walks through grammars."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import replace

from fake_runner import request
from quire.core.request import Request
from quire.core.sequence import Guide as SequenceGuide
from quire.core.structured import StructuredOutputsParams
from quire.text.structured.grammar_reader import READER
from quire.text.structured.guide import Grammar, GrammarGuide
from quire.text.structured.vocabulary import vocabulary_of
from shaped import VOCAB, tokenizer

END = 4


def ready(shape: StructuredOutputsParams) -> tuple[Grammar, tuple[int, ...]]:
    vocabulary = vocabulary_of(tokenizer(), VOCAB)
    read = READER.read(shape, (END,), vocabulary)
    return Grammar(read.grammar, vocabulary), read.completion


def wander(guide: GrammarGuide, most: int, draw: np.random.Generator, size: int = VOCAB) -> list[int]:
    """Tokens of a model that knows nothing: any that may come, each as likely as the other."""
    said: list[int] = []
    bits = np.empty(size // 32 + 1, np.int32)
    while len(said) < most and not guide.complete(len(said)):
        assert guide.follow(said, 0)
        guide.mask(bits)
        may = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:size])
        for _ in range(4):
            token = int(draw.choice(may))
            if guide.takes(token):
                break
        else:
            token = guide.only[0]
            assert guide.takes(token)
        if token == END:
            break
        said.append(token)
        assert len(guide.completion) <= most - len(said)
    return said


class AnyText:
    """A guide that allows everything. `seconds`: as long as each token of it takes."""

    turn = 0

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def complete(self, made: int) -> bool:
        return False

    def anew(self) -> SequenceGuide:
        return self


def structured(name: str, prompt: list[int], tokens: int, **more: Any) -> Request:
    """A request with a grammar."""
    return replace(request(name, prompt, tokens, eos=(), **more), grammar="any", tenant=name[0])
