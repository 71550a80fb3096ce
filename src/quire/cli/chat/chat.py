"""A chat on the terminal: lines become commands or messages, and messages are answered."""

from __future__ import annotations

import sys
from contextlib import closing
from itertools import chain

from quire.cli.chat.answer import Answer
from quire.cli.chat.backend import ChatBackend
from quire.cli.chat.commands import Leave, run_command
from quire.cli.chat.conversation import Conversation
from quire.cli.chat.screen import Screen
from quire.core.errors import BadRequest, ConfigError, ModelError, Unavailable
from quire.core.version import VERSION


class Chat:
    """A conversation between whoever types on `screen` and the model of `backend`.

    `verbose`: whether the speed of each answer is shown; None: where standard error is a terminal.
    """

    def __init__(
        self, backend: ChatBackend, conversation: Conversation, screen: Screen, verbose: bool | None = None
    ) -> None:
        self.backend, self.conversation, self.screen, self.verbose = backend, conversation, screen, verbose

    def run(self, first: str = "") -> None:
        """Answer until the input ends or the user leaves; where somebody types, an error does not end the chat.

        `first`: the message to begin with, before what is typed.
        """
        if self.screen.live:
            self._banner()
        for line in chain([first] if first else [], self.screen.lines()):
            try:
                if run_command(self, line):
                    continue
                self.conversation.ask(line)
                if not self._waits():
                    self.answer()
            except Leave:
                return
            except (BadRequest, ConfigError, ModelError, Unavailable) as error:
                if not self.screen.live and not line.startswith("/"):
                    raise
                self.screen.say(error.message)

    def answer(self) -> None:
        """Answer the last message; it is taken away where it cannot be answered."""
        answer = Answer()
        try:
            with (
                self.screen.interrupts() as stopped,
                closing(self.backend.answer(self.conversation, stopped, answer)) as pieces,
            ):
                self.screen.show(pieces)
        except BaseException:
            self.conversation.unask()
            raise
        self.conversation.messages.append(answer.message)
        if self.backend.timings and (sys.stderr.isatty() if self.verbose is None else self.verbose):
            self.screen.say(self.backend.timings)
        self._waits()

    def _waits(self) -> bool:
        """Whether the next message is the result of a call of a tool; the user is told so."""
        call = self.conversation.open_call
        if call is not None:
            self.screen.say(f"[the next message is what {call['function']['name']} returned; /retry asks again]")
        return call is not None

    def _banner(self) -> None:
        """Which model it is, what it takes, and how to leave."""
        from rich.console import Console

        console = Console(stderr=True, highlight=False)
        console.print(f"[bold]{self.backend.name}[/bold]  [dim]quire {VERSION}[/dim]", soft_wrap=True)
        for line in self.backend.facts:
            console.print(line, style="dim", markup=False, soft_wrap=True)
        console.print("/help lists commands, Ctrl-C stops an answer, /exit leaves", style="dim", soft_wrap=True)
