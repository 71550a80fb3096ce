"""Grammars that engines could not follow are refused after a few failures, for their tenant, for a while."""

from __future__ import annotations

import weakref

import pytest

from quire.core.errors import BadRequest, GrammarTooComplex
from quire.text.structured import refused_grammars
from quire.text.structured.refused_grammars import FAILURES, SECONDS, RefusedGrammars

TOO_COMPLEX = GrammarTooComplex("structured_outputs.regex: too complex here", param="structured_outputs.regex")


class Clock:
    """A time that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def failed(grammars: RefusedGrammars, times: int = FAILURES, grammar: str = "g") -> None:
    for _ in range(times):
        grammars.check("a", grammar)
        grammars.note("a", grammar, TOO_COMPLEX)


def test_what_failed_often_is_refused_with_the_same_words() -> None:
    grammars = RefusedGrammars()
    failed(grammars)
    with pytest.raises(GrammarTooComplex, match="too complex here") as error:
        grammars.check("a", "g")
    assert error.value.param == "structured_outputs.regex"
    grammars.check("b", "g")
    grammars.check("a", "another")


def test_one_failure_and_failures_of_other_kinds_refuse_nothing() -> None:
    grammars = RefusedGrammars()
    failed(grammars, FAILURES - 1)
    for _ in range(FAILURES):
        grammars.note("a", "g", BadRequest("something else"))
    grammars.check("a", "g")


def test_it_is_forgotten_after_a_while() -> None:
    clock = Clock()
    grammars = RefusedGrammars(clock)
    failed(grammars)
    clock.now = SECONDS + 1
    grammars.check("a", "g")
    grammars.note("a", "g", TOO_COMPLEX)
    grammars.check("a", "g")


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused_grammars, "KEPT", 4)
    grammars = RefusedGrammars()
    for name in "abcde":
        failed(grammars, grammar=name)
    grammars.check("a", "a")
    with pytest.raises(GrammarTooComplex):
        grammars.check("a", "b")


def test_an_error_that_was_noted_is_not_kept() -> None:
    """Its traceback would keep what the request's frames hold."""
    grammars, error = RefusedGrammars(), GrammarTooComplex("grammar: too complex")
    kept = weakref.ref(error)
    grammars.note("tenant", "g", error)
    del error
    assert kept() is None
