"""Answers that are one message in blocks: what the APIs of Anthropic, Ollama and OpenAI's responses have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from quire.core.request import TokenLogprob
from quire.server.api.answer import Answer
from quire.server.assistant import Assistant
from quire.server.generation import Generated, Piece
from quire.server.http.body import off_loop
from quire.server.service import Service
from quire.server.speech import Speech
from quire.text.messages.text_source import MessageDelta


@dataclass(slots=True)
class Block:
    """`text`: all of it so far; of a call its arguments in JSON, beside the call's own `id` and `name`."""

    kind: Literal["content", "reasoning", "call"]
    text: str = ""
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """What becomes of the block `index`; `text`: what it gained."""

    what: Literal["begin", "gain", "end"]
    index: int
    block: Block
    text: str = ""


class Blocks:
    """Reads deltas. `all`: every block so far, in order."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open = False

    def push(self, deltas: Sequence[MessageDelta]) -> list[Step]:
        """What the deltas do."""
        steps: list[Step] = []
        for delta in deltas:
            if delta.kind == "call":
                steps += self._begin(Block("call", id=delta.id, name=delta.name))
            elif delta.kind != "arguments" and not (self._open and self.all[-1].kind == delta.kind):
                steps += self._begin(Block(delta.kind))
            if delta.text:
                block = self.all[-1]
                block.text += delta.text
                steps.append(Step("gain", len(self.all) - 1, block, delta.text))
        return steps

    def end(self) -> list[Step]:
        """The end of what is open."""
        steps = [Step("end", len(self.all) - 1, self.all[-1])] if self._open else []
        self._open = False
        return steps

    def _begin(self, block: Block) -> list[Step]:
        steps = self.end()
        self.all.append(block)
        self._open = True
        return [*steps, Step("begin", len(self.all) - 1, block)]


_encode = msgspec.json.encode


def named_event(kind: str, **fields: Any) -> bytes:
    """A server-sent event that has a name, which is its `type` too."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


class Spoken(Answer):
    """`reasons`: reasoning is shown. `finish_reason` and `stop_reason` are those of its piece, None until the end."""

    def __init__(
        self,
        service: Service,
        generation: Generated,
        speech: Speech,
        *,
        model: str,
        stream: bool,
        reasons: bool = True,
    ) -> None:
        super().__init__(service, generation, model, stream)
        self._assistant = Assistant(speech)
        self._counts = speech.formats.reasoning is not None
        self._reasons = reasons
        self._begun = False
        self.blocks = Blocks()
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def opening(self) -> bytes:
        """What a stream says first."""
        return b""

    @abstractmethod
    def message(self, steps: Iterable[Step], logprobs: list[TokenLogprob]) -> bytes:
        """What a stream says of the steps of one piece, and of the log-probabilities that came with it."""

    @abstractmethod
    def closing(self) -> bytes:
        """What a stream says at the end."""

    @abstractmethod
    def whole(self) -> Any:
        """The reply, when all was said."""

    async def events(self, pieces: list[Piece]) -> bytes:
        """The messages of one step."""
        lead = b"" if self._begun or not pieces else self.opening()
        self._begun |= bool(pieces)
        return lead + b"".join(self.message(*self._push(piece)) for piece in pieces)

    def tail(self) -> bytes:
        """What follows those of the last."""
        return self.closing()

    def add(self, pieces: list[Piece]) -> None:
        """Collect for `reply`."""
        for piece in pieces:
            self._push(piece)

    async def reply(self) -> list[bytes]:
        """The whole response."""
        size = sum(len(block.text) for block in self.blocks.all)
        return [await off_loop(size, lambda: _encode(self.whole()))]

    def said(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """The one choice's content and calls."""
        return [self._assistant.said]

    @property
    def calls(self) -> bool:
        """Whether tools are called."""
        return any(block.kind == "call" for block in self.blocks.all)

    @property
    def reasoning_tokens(self) -> int | None:
        """How many tokens were reasoning; None where the model's cannot be told."""
        return self._assistant.reasoning_tokens if self._counts else None

    def _push(self, piece: Piece) -> tuple[list[Step], list[TokenLogprob]]:
        said = self._assistant.push(piece)
        steps = self.blocks.push([d for d in said.deltas if self._reasons or d.kind != "reasoning"])
        self.logprobs += said.logprobs
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
            steps += self.blocks.end()
        return steps, said.logprobs


def arguments_of(text: str) -> dict[str, Any]:
    """A call's arguments as an object; those of a call that was cut off are none."""
    try:
        value = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}
