"""The tokens that stand before and after every text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import processors

Token = tuple[int, str]
"""(id, text)."""


def put_around(before: Sequence[Token], after: Sequence[Token]) -> processors.TemplateProcessing:
    """The post-processor that puts `before` and `after` around the tokens of a text.

    The template calls them by names of our own: a token whose text has a colon or begins with $ is none there.
    """
    first = [(f"before{i}", *token) for i, token in enumerate(before)]
    last = [(f"after{i}", *token) for i, token in enumerate(after)]
    return processors.TemplateProcessing(
        single=[*(name for name, _, _ in first), "$A", *(name for name, _, _ in last)],
        special_tokens=[{"id": name, "ids": [i], "tokens": [text]} for name, i, text in [*first, *last]],
    )


def found_around(processor: processors.PostProcessor | None) -> tuple[list[Token], list[Token]]:
    """The tokens that a post-processor puts before and after a text."""
    return ([], []) if processor is None else _around(json.loads(processor.__getstate__()))


def _around(state: dict[str, Any]) -> tuple[list[Token], list[Token]]:
    before, after = list[Token](), list[Token]()
    if state["type"] == "Sequence":
        for part in state["processors"]:
            first, last = _around(part)
            before, after = first + before, after + last
    elif state["type"] in ("BertProcessing", "RobertaProcessing"):
        for place, (text, number) in ((before, state["cls"]), (after, state["sep"])):
            place.append((number, text))
    elif state["type"] == "TemplateProcessing":
        place = before
        for piece in state["single"]:
            if "SpecialToken" not in piece:
                place = after
                continue
            special = state["special_tokens"][piece["SpecialToken"]["id"]]
            place += zip(special["ids"], special["tokens"], strict=True)
    return before, after
