"""What was won and lost, in words."""

from __future__ import annotations

import pytest

from quire.cli.show import show_columns, show_next
from quire.figures.changes import changed, with_text


def test_a_change_says_whether_it_is_better() -> None:
    assert changed("perplexity", 10, 11).cells == ("perplexity", "10", "11", "+10.0%", "lost")
    assert changed("tokens/s", 10, 11, rises=True).verdict == "won"
    assert changed("size", 100, 50).verdict == "won" and changed("size", 1000, 1001).verdict == ""
    assert changed("new", 0, 3).change == ""
    assert with_text(changed("size", 100, 50), "100 B", "50 B").shown == ("100 B", "50 B")


def test_tables_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    show_columns(("", "before", "after"), [("size", "1", "1,000"), ("perplexity", "10", "9")])
    show_next(("quire serve a", "serve it"), ("quire eval a --limit 3", "measure it"))
    assert capsys.readouterr().out.splitlines() == [
        "            before  after",
        "size             1  1,000",
        "perplexity      10      9",
        "next:",
        "  quire serve a           # serve it",
        "  quire eval a --limit 3  # measure it",
    ]
