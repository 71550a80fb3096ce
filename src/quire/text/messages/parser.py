"""Parser of tool calls and reasoning: the text of one message as it comes -> deltas that a client is sent."""

from __future__ import annotations

from quire.text.messages.formats import HARMONY, ToolFormat
from quire.text.messages.harmony import harmony
from quire.text.messages.reasoning import ReasoningFormat, read_reasoning
from quire.text.messages.text_source import Malformed, MessageDelta, ParserRequest, Steps, TextSource, attempt


class Parser:
    """`push` text, then `end` once; together their deltas are the message, however the text was cut.

    Nothing raises: what is no call of the format is content. A call that breaks off keeps the arguments said so far, a
    beginning of JSON, and what follows is content.
    """

    def __init__(self, reasoning: ReasoningFormat | None, tools: ToolFormat | None, reading: ParserRequest) -> None:
        self._source = TextSource(reading)
        self._steps = _message(self._source, reasoning, tools if reading.schemas is not None else None)
        self._run()

    @property
    def holding(self) -> bool:
        """Whether it is open what the text read last is."""
        return self._source.holding

    def push(self, text: str) -> list[MessageDelta]:
        """More text."""
        self._source.add(text)
        return self._run()

    def end(self) -> list[MessageDelta]:
        """No more text."""
        self._source.ended = True
        deltas = self._run()
        self._source.finish()
        return deltas + self._taken()

    def _run(self) -> list[MessageDelta]:
        next(self._steps, None)
        return self._taken()

    def _taken(self) -> list[MessageDelta]:
        deltas, self._source.out = self._source.out, []
        return _merged(deltas)


def _message(source: TextSource, reasoning: ReasoningFormat | None, tools: ToolFormat | None) -> Steps[None]:
    if HARMONY in (reasoning and reasoning.name, tools and tools.name):
        yield from harmony(source)
        return
    if reasoning is not None:
        yield from read_reasoning(source, reasoning)
    if tools is None:
        yield from source.content_until(())
        return
    if tools.bare:
        source.hold()
        yield from attempt(source, _bare(source, tools), tools.closers)
    while opener := (yield from source.content_until(tools.openers)):
        yield from attempt(source, tools.body(source, opener), tools.closers)


def _bare(source: TextSource, tools: ToolFormat) -> Steps[None]:
    yield from source.space()
    if (yield from source.ahead(1)) != tools.bare:
        raise Malformed
    yield from tools.body(source, "")


def _merged(deltas: list[MessageDelta]) -> list[MessageDelta]:
    """Neighbours of one kind as one."""
    out: list[MessageDelta] = []
    for delta in deltas:
        if out and delta.kind != "call" and (out[-1].kind, out[-1].index) == (delta.kind, delta.index):
            out[-1] = MessageDelta(delta.kind, out[-1].text + delta.text, delta.index)
        else:
            out.append(delta)
    return out
