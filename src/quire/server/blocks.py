"""A message as blocks, each of one kind, that begin, gain text and end in turn: what APIs stream that have such."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quire.text.messages.source import Delta


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

    def push(self, deltas: Sequence[Delta]) -> list[Step]:
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
