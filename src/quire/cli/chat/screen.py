"""The terminal of a chat: lines that the user types, answers as they are written, and Ctrl-C."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from quire.cli.generate import standard_input, typed
from quire.core.machine import cache_folder

PROMPT, MORE = "> ", ". "
"""Before a first line and before those that follow within triple quotes."""
QUOTES = '"""'
HISTORY_LINES = 2000


class Screen:
    """Where a chat is shown. `live`: somebody types; `drawn`: answers are drawn as markdown, else written as text."""

    def __init__(self) -> None:
        self.live = standard_input().isatty()
        self.drawn = self.live and sys.stdout.isatty()

    def say(self, text: str) -> None:
        """Tell the user something that is no answer."""
        print(text, file=sys.stderr)

    def lines(self) -> Iterator[str]:
        """What the user types, or the lines of a pipe, up to the end of the input.

        Lines from a triple quote to the next one are one, also behind a command. Where somebody types, Ctrl-C clears
        the line, and twice in a row it raises `KeyboardInterrupt`.
        """
        with self._history():
            again = False
            while True:
                try:
                    line = self._read(PROMPT).strip()
                    before, quotes, rest = line.partition(QUOTES)
                    if quotes and (not before or before.startswith("/")):
                        line = before + self._quoted(rest)
                except EOFError:
                    if self.live:
                        print()
                    return
                except KeyboardInterrupt:
                    if not self.live or again:
                        raise
                    again = True
                    print("\n[Ctrl-C again, /exit or Ctrl-D leaves]", file=sys.stderr)
                    continue
                again = False
                if line:
                    yield line

    def _quoted(self, line: str) -> str:
        """The lines up to the closing triple quote, or the end of the input."""
        lines = [line]
        while not lines[-1].rstrip().endswith(QUOTES):
            try:
                lines.append(self._read(MORE))
            except EOFError:
                break
        return "\n".join(lines).rstrip().removesuffix(QUOTES).strip()

    def _read(self, prompt: str) -> str:
        return typed(lambda: input(prompt) if self.live else input())

    @contextmanager
    def _history(self) -> Iterator[None]:
        """Editing of lines, and those of earlier chats, where somebody types."""
        if not self.live:
            yield
            return
        import readline

        path = cache_folder() / "chat-history"
        with contextlib.suppress(OSError):
            readline.read_history_file(path)
        readline.set_history_length(HISTORY_LINES)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch(mode=0o600)
                readline.write_history_file(path)

    def show(self, pieces: Iterable[str]) -> str:
        """Show an answer as it comes; its text."""
        return show_answer(pieces, self.drawn)

    @contextmanager
    def interrupts(self) -> Iterator[Callable[[], bool]]:
        """Whether Ctrl-C came, where somebody types: it ends the answer; a second one raises `KeyboardInterrupt`."""
        came = False

        def note(number: int, frame: FrameType | None) -> None:
            nonlocal came
            if came:
                raise KeyboardInterrupt
            came = True

        before = signal.signal(signal.SIGINT, note) if self.live else None
        try:
            yield lambda: came
        finally:
            if before is not None:
                signal.signal(signal.SIGINT, before)


def show_answer(pieces: Iterable[str], drawn: bool) -> str:
    """Write an answer to standard output as it comes, as markdown where it is `drawn`; its text."""
    text = ""
    if not drawn:
        for piece in pieces:
            text += piece
            print(piece, end="", flush=True)
        print(flush=True)
        return text
    from rich.console import Console

    from quire.cli.chat.markdown import MarkdownStream

    size, console = shutil.get_terminal_size(), Console()
    if console.is_dumb_terminal or console.no_color:
        return show_answer(pieces, drawn=False)
    stream = MarkdownStream(sys.stdout, size.columns, size.lines, color=True)
    try:
        for piece in pieces:
            text += piece
            stream.push(piece)
    finally:
        stream.end()
    return text
