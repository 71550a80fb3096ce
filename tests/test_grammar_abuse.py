"""Generated grammars that mean harm: a few of them against the edge, and 5,000 against a whole server."""

from __future__ import annotations

import asyncio

import pytest

import grammar_abuse
from live_server import live
from quire.text.structured import grammar_reader
from stub_engine import StubEngine


def test_generated_grammars_are_answered_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_reader, "SECONDS", 0.2)
    with live(StubEngine()) as server:
        report = asyncio.run(grammar_abuse.abuse(server.port, 40, 40, clients=8, quiet=3))
        assert not report.failed, report.failed[0]
        assert sum(report.statuses.values()) == 40 and set(report.statuses) <= {200, 400, 429}
        assert {200, 400} <= set(report.statuses)
        assert all(report.beside.values())


def test_cases_are_those_of_their_seed() -> None:
    assert list(grammar_abuse.cases(20, 3)) == list(grammar_abuse.cases(20, 3))
    paths = {path for path, _ in grammar_abuse.cases(60, 1)}
    assert paths == {"/v1/completions", "/generate"}


@pytest.mark.slow
def test_five_thousand_grammars_end_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["grammar_abuse.py"])
    assert grammar_abuse.main() == 0
