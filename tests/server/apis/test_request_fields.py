"""docs/request-fields.md says what happens: every field of OpenAI's and vLLM's is honoured, named or refused."""

from __future__ import annotations

import pytest

from request_fields import BEGIN, END, TABLE, lines, server


def test_the_table_is_what_happens() -> None:
    with server() as running:
        found = "".join(lines(running))
    assert TABLE.read_text().partition(BEGIN)[2].partition(END)[0] == found, "run make fields"


def test_special_tokens_are_left_out_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with server() as running:
        seen: list[bool] = []
        encode = running.tokenizer.encode

        def noted(text: str, add_special_tokens: bool = True) -> list[int]:
            seen.append(add_special_tokens)
            return encode(text, add_special_tokens)

        monkeypatch.setattr(running.tokenizer, "encode", noted)
        for fields in ({}, {"add_special_tokens": False}):
            running.complete("a", max_tokens=1, **fields)
    assert seen == [True, False]
