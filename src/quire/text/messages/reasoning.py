"""Reasoning at the beginning of a message, between two marks."""

from __future__ import annotations

from dataclasses import dataclass

from quire.text.messages.text_source import Malformed, Steps, TextSource


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A row of the table. `assumed`: a message begins with reasoning even if nothing says so."""

    name: str
    openers: tuple[str, ...]
    closers: tuple[str, ...]
    assumed: bool = False


def read_reasoning(source: TextSource, row: ReasoningFormat) -> Steps[None]:
    """The reasoning, white space around it left out; nothing where the message has none."""
    if source.reading.inside is False:
        return
    source.hold()
    try:
        yield from source.space()
        if not (yield from source.accept(*row.openers)) and not row.assumed and not source.reading.inside:
            raise Malformed
    except Malformed:
        source.give_back()
        return
    source.release()
    yield from source.space()
    space = ""

    def show(text: str) -> None:
        nonlocal space
        shown = (space + text).rstrip()
        space = (space + text)[len(shown) :]
        source.reasoning(shown)

    if (yield from source.until(row.closers, show)):
        yield from source.space()
