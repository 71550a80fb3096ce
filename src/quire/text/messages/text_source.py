"""The engine that all formats share: text comes in pieces of any size, a format reads it as if it were whole.
See docs/design/messages.md.

A format is a generator that yields where it wants more text. What it reads next depends on the text alone, never on
where that was cut, so any split of a stream gives the same messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A part of a format: yields where more text is wanted, returns what it found."""
Sink = Callable[[str], None]

MAX_HELD = 1 << 16
"""Characters of a call held back at most until its name is known, and of a value until it is whole."""
MAX_NAME = 256
"""Characters of a function's or an argument's name."""


class Malformed(Exception):
    """What follows an opening marker is no call: it becomes content."""


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """What a message gains. "call" starts a tool call (`index`, `id`, `name`), "arguments" is more of its JSON text."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str = ""
    index: int = 0
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class ParserRequest:
    """What a format is told of a request.

    `schemas`: parameters (JSON schema) by the names of functions; None = calls are not read. `inside`: the prompt ends
    within the reasoning (True), behind it (False), or says nothing (None). `hidden`: markers that are special tokens,
    which nobody is shown.
    """

    new_id: Callable[[], str]
    schemas: Mapping[str, Mapping[str, Any]] | None = None
    inside: bool | None = None
    hidden: frozenset[str] = frozenset()


@dataclass(slots=True)
class TextSource:
    """Text as a format reads it, and the deltas it makes of that."""

    reading: ParserRequest
    text: str = ""
    at: int = 0
    ended: bool = False
    out: list[MessageDelta] = field(default_factory=list)
    calls: int = 0
    _record: list[str] | None = None
    _recorded: int = 0
    _space: str = ""

    def add(self, text: str) -> None:
        """More text."""
        self.text = self.text[self.at :] + text
        self.at = 0

    def take(self, count: int) -> str:
        """The next `count` characters, which are there; `Malformed` at exactly `MAX_HELD` that are held back."""
        if self._record is None:
            text = self.text[self.at : self.at + count]
            self.at += count
            return text
        text = self.text[self.at : self.at + min(count, MAX_HELD - self._recorded)]
        self.at += len(text)
        self._record.append(text)
        self._recorded += len(text)
        if len(text) < count:
            raise Malformed
        return text

    def ahead(self, count: int) -> Steps[str]:
        """The next `count` characters, fewer at the end, without taking them."""
        while len(self.text) - self.at < count and not self.ended:
            yield
        return self.text[self.at : self.at + count]

    def accept(self, *literals: str) -> Steps[bool]:
        """Take one of `literals`, if it comes next."""
        for literal in literals:
            while not self.ended and len(self.text) - self.at < len(literal):
                if not literal.startswith(self.text[self.at :]):
                    break
                yield
            if self.text.startswith(literal, self.at):
                self.take(len(literal))
                return True
        return False

    def expect(self, *literals: str) -> Steps[None]:
        """Read one of `literals`, which must come next; `Malformed` where none does."""
        if not (yield from self.accept(*literals)):
            raise Malformed

    def space(self) -> Steps[None]:
        """Take white space."""
        while (char := (yield from self.ahead(1))) and char.isspace():
            self.take(1)

    def closed(self, *closers: str) -> Steps[None]:
        """Take what closes a call, as far as it is there."""
        while True:
            space = ""
            while (char := (yield from self.ahead(1))) and char.isspace():
                space += self.take(1)
            if not (yield from self.accept(*closers)):
                self._space = space
                return

    def until(self, markers: Sequence[str], sink: Sink, half: bool = True) -> Steps[str]:
        """Give `sink` the text before the first of `markers`; that marker, taken, or "" at the end of the text.

        `half`: the beginning of a marker at the end of the text is text.
        """
        pattern, starts, longest = _compiled(tuple(markers))
        while True:
            found = pattern.search(self.text, self.at) if markers else None
            if found is not None:
                sink(self.take(found.start() - self.at))
                return self.take(len(found[0]))
            end = len(self.text)
            if markers and not (self.ended and half):
                end -= _overlap(self.text[max(self.at, end - longest + 1) :], markers, starts)
            if end > self.at:
                sink(self.take(end - self.at))
            if self.ended:
                return ""
            yield

    def until_one(self, markers: Sequence[str], limit: int = MAX_HELD) -> Steps[tuple[str, str]]:
        """The text before the first of `markers`, and which that is; `Malformed` without one, or beyond `limit`."""
        held: list[str] = []
        marker = yield from self.until(markers, held.append)
        text = "".join(held)
        if not marker or len(text) > limit:
            raise Malformed
        return text, marker

    def hold(self, *taken: str) -> None:
        """Hold back what is read from here, behind what was `taken`, until `start`, `release` or `give_back`."""
        self._record, self._recorded = list(taken), sum(map(len, taken))

    @property
    def holding(self) -> bool:
        """Whether it is open what the text read last is."""
        return self._record is not None

    def release(self) -> None:
        """What was held belongs to a call that is said."""
        self._record = None

    def give_back(self) -> None:
        """What was held is content after all."""
        held, self._record = self._record, None
        if held is not None:
            text = "".join(held)
            for marker in self.reading.hidden:
                text = text.replace(marker, "")
            self.content(text)

    def content(self, text: str) -> None:
        """Content; white space waits for text: before a call, and behind the last one, it is none."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._emit("content", shown)

    def reasoning(self, text: str) -> None:
        """Reasoning."""
        self._emit("reasoning", text)

    def start(self, name: str) -> None:
        """A call begins: what was held of it is no content."""
        self._record, self._space = None, ""
        self.out.append(MessageDelta("call", index=self.calls, id=self.reading.new_id(), name=name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """More of the last call's arguments."""
        if text:
            self.out.append(MessageDelta("arguments", text, self.calls - 1))

    def finish(self) -> None:
        """The end of the message."""
        if not self.calls:
            self._emit("content", self._space)
        self._space = ""

    def _emit(self, kind: Literal["content", "reasoning"], text: str) -> None:
        if text:
            self.out.append(MessageDelta(kind, text))

    def content_until(self, openers: Sequence[str]) -> Steps[str]:
        """Content up to one of `openers`, which is taken and held; "" at the end. Hidden markers are left out."""
        while True:
            marker = yield from self.until((*openers, *self.reading.hidden.difference(openers)), self.content)
            if marker in openers:
                self.hold(marker)
            if marker in openers or not marker:
                return marker


@cache
def _compiled(markers: tuple[str, ...]) -> tuple[re.Pattern[str], frozenset[str], int]:
    ordered = sorted(markers, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, ordered)))
    return pattern, frozenset(m[0] for m in markers), max(map(len, markers), default=1)


def attempt(source: TextSource, body: Steps[None], closers: Sequence[str]) -> Steps[None]:
    """Read calls and what closes them; what is none of what was held becomes content."""
    try:
        yield from body
    except Malformed:
        source.give_back()
        return
    source.release()
    yield from source.closed(*closers)


def _overlap(tail: str, markers: Sequence[str], starts: frozenset[str]) -> int:
    """Length of the longest end of `tail` that is a beginning of a marker."""
    for i, char in enumerate(tail):
        if char in starts and any(marker.startswith(tail[i:]) for marker in markers):
            return len(tail) - i
    return 0
