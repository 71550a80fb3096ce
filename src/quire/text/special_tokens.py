"""The tokens that stand before and after every text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import processors

Token = tuple[int, str]
"""(id, text)."""


def put_around(
    before: Sequence[Token], after: Sequence[Token], *, between: Sequence[Token] = (), kinds: bool = False
) -> processors.TemplateProcessing:
    """The post-processor that puts `before` and `after` around the tokens of a text.

    Of a pair, `after` stands behind each, and `between` before the second; `kinds`: what is of the second is of another
    kind.

    The template calls them by names of our own: a token whose text has a colon or begins with $ is none there.
    """
    first = [(f"before{i}", *token) for i, token in enumerate(before)]
    last = [(f"after{i}", *token) for i, token in enumerate(after)]
    middle = [(f"between{i}", *token) for i, token in enumerate(between)]
    single = [*(name for name, _, _ in first), "$A", *(name for name, _, _ in last)]
    second = ["$B", *(name for name, _, _ in last)]
    return processors.TemplateProcessing(
        single=single,
        pair=[*single, *(name for name, _, _ in middle), *(f"{name}:{int(kinds)}" for name in second)],
        special_tokens=[{"id": name, "ids": [i], "tokens": [text]} for name, i, text in [*first, *last, *middle]],
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


def joined(backend: Any, texts: tuple[str, str], limit: int, last: bool) -> tuple[list[int], int]:
    """Token ids of two texts as the post-processor of `backend` joins a pair, and where the second type of tokens
    begins, 0: nowhere.

    Of `limit` tokens at most, if that is not 0: the longer text is cut at its end, or to its `last` tokens. Of two that
    are as long, the second keeps one more.
    """
    parts = [backend.encode(text, add_special_tokens=False) for text in texts]
    if limit:
        room = max(limit - backend.num_special_tokens_to_add(True), 0)
        most = max(room - min(len(part.ids) for part in parts), -(-room // 2))
        for part in parts if len(parts[0].ids) > len(parts[1].ids) else parts[::-1]:
            part.truncate(min(most, len(part.ids)), direction="left" if last else "right")
            most = room - len(part.ids)
    whole = backend.post_process(parts[0], parts[1])
    return whole.ids, whole.type_ids.index(1) if 1 in whole.type_ids else 0
