"""The tokens that stand before and after every text."""

from __future__ import annotations

from tokenizers import processors

Token = tuple[int, str]
"""(id, text)."""


def put_around(before: Token | None, after: Token | None) -> processors.TemplateProcessing:
    """The post-processor that puts `before` and `after` around the tokens of a text.

    The template calls them by names of our own: a token whose text has a colon or begins with $ is none there.
    """
    given = [(name, *token) for name, token in (("before", before), ("after", after)) if token is not None]
    names = [name for name, _, _ in given]
    return processors.TemplateProcessing(
        single=[*(n for n in names if n == "before"), "$A", *(n for n in names if n == "after")],
        special_tokens=[{"id": name, "ids": [number], "tokens": [text]} for name, number, text in given],
    )
