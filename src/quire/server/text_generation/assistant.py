"""Messages (content, reasoning, tool calls) out of pieces of a choice's text, for every API that has messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.core.request import TokenLogprob
from quire.server.text_generation.generation import Piece
from quire.server.text_generation.output_parsing import OutputParsing
from quire.text.messages.text_source import MessageDelta


@dataclass(slots=True)
class ChoiceDelta:
    """What a message gains: deltas, the log-probabilities of its content's tokens, why it ended."""

    deltas: list[MessageDelta] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(slots=True)
class Call:
    """A tool call as far as it has come; `arguments` is JSON."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """All that was said."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Assistant:
    """Reads one choice. Its pieces have one token each (`Generation(each=True)`) where there may be more than content.

    A token belongs to what its text became. While that is open it waits, with its log-probabilities.
    """

    def __init__(self, parsing: OutputParsing) -> None:
        self._parser = parsing.parser()
        self._parallel, self._named = parsing.parallel, bool(parsing.choice)
        self._pending: list[TokenLogprob] = []
        self._tokens = 0
        self._last = ""
        self.reasoning_tokens = 0
        self.message = Message()

    def push(self, piece: Piece) -> ChoiceDelta:
        """What `piece` adds; `message` collects it."""
        reason = piece.finish_reason
        if self._parser is None:
            said = ChoiceDelta([MessageDelta("content", piece.text)] if piece.text else [], piece.logprobs, reason)
        else:
            deltas = self._parser.push(piece.text)
            if reason is not None:
                deltas += self._parser.end()
            logprobs = self._credit(piece, deltas)
            if not self._parallel:
                deltas = [delta for delta in deltas if delta.index == 0]
            said = ChoiceDelta(deltas, logprobs, reason)
        self._collect(said)
        said.finish_reason = self.ended(reason)
        return said

    def ended(self, reason: str | None) -> str | None:
        """Why the message ended: a stop behind calls is theirs, but for OpenAI where a request names the function."""
        return "tool_calls" if reason == "stop" and self.message.calls and not self._named else reason

    @property
    def said(self) -> tuple[str, list[tuple[str, str]]]:
        """The content, and the names and arguments of calls."""
        return self.message.content, [(call.name, call.arguments) for call in self.message.calls]

    def _credit(self, piece: Piece, deltas: list[MessageDelta]) -> list[TokenLogprob]:
        """Say whose the tokens are that wait; the content's log-probabilities."""
        self._pending += piece.logprobs
        self._tokens += len(piece.tokens)
        if deltas:
            self._last = "content" if any(d.kind == "content" for d in deltas) else deltas[-1].kind
        elif piece.finish_reason is None and (
            self._last in ("", "content") or (self._parser is not None and self._parser.holding)
        ):
            return []
        if self._last == "reasoning":
            self.reasoning_tokens += self._tokens
        entries, self._pending, self._tokens = self._pending, [], 0
        return entries if self._last in ("", "content") else []

    def _collect(self, said: ChoiceDelta) -> None:
        message = self.message
        message.logprobs += said.logprobs
        for delta in said.deltas:
            if delta.kind == "content":
                message.content += delta.text
            elif delta.kind == "reasoning":
                message.reasoning += delta.text
            elif delta.kind == "call":
                message.calls.append(Call(delta.id, delta.name))
            else:
                message.calls[delta.index].arguments += delta.text
