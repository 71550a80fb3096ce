"""One of a request's sequences as whoever asked collects it: `LLM` and the server alike."""

from __future__ import annotations

from collections.abc import Callable

from quire.core.request import Output, SequenceStats
from quire.text.detokenizer import Growth, OutputText


class Continuation(SequenceStats, eq=False):
    """What came of a sequence: `tokens` of its text, which `begin` makes when there is something to read (many wait for
    long), and what the engine says beside. `done`: the text has ended."""

    begin: Callable[[], OutputText]
    text: OutputText | None = None
    tokens: int = 0
    done: bool = False

    def push(self, output: Output) -> Growth | None:
        """What the next output adds; None behind the end of the text, which a stop string may end before the engine
        knows."""
        if self.done:
            return None
        self.note(output)
        if self.text is None:
            self.text = self.begin()
        growth = self.text.push(output)
        self.tokens += growth.used
        self.done = growth.finish_reason is not None
        return growth
