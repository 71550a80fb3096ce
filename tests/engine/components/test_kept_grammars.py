"""Which grammars an engine keeps: those that came twice, and those that somebody follows now."""

from __future__ import annotations

import gc
from concurrent.futures import Future
from typing import Any

from quire.core.config import ModelConfig
from quire.engine.components import grammar_compiler
from quire.engine.components.grammar_compiler import GrammarCompiler
from quire.text.structured.vocabulary import vocabulary_of
from shaped import VOCAB, tokenizer


def made() -> GrammarCompiler:
    found = GrammarCompiler(ModelConfig(), "", VOCAB)
    found.__dict__["_vocabulary"] = vocabulary_of(tokenizer(), VOCAB)
    return found


def of(number: int) -> str:
    return f'start: "a{number}"'


def test_what_came_once_is_gone_with_whoever_follows_it() -> None:
    engine = made()
    first = engine._grammar(of(1))
    assert engine._grammar(of(2)) is not first
    assert engine._alive[of(1)] is first
    del first
    gc.collect()
    assert of(1) not in engine._alive
    assert not engine._kept


def test_what_came_twice_is_kept_and_the_number_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(grammar_compiler, "KEPT", 3)
    engine = made()
    for _ in range(2):
        for number in range(5):
            engine._grammar(of(number))
    assert list(engine._kept) == [of(2), of(3), of(4)]
    kept = engine._kept[of(3)]
    assert engine._grammar(of(3)) is kept


def test_one_that_is_spent_is_made_anew() -> None:
    engine = made()
    engine._grammar(of(1))
    old = engine._grammar(of(1))
    assert engine._grammar(of(1)) is old
    old.renewed()
    assert engine._grammar(of(1)) is not old


def test_memory_is_given_back_now_and_then(monkeypatch: Any) -> None:
    given = Future[int]()
    monkeypatch.setattr(grammar_compiler, "trim_heap", lambda: given.set_result(engine._made))
    engine = made()
    for number in range(grammar_compiler.RETURN_EVERY):
        engine._grammar(of(number))
    assert given.result(0) == grammar_compiler.RETURN_EVERY
