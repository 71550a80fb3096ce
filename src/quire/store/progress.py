"""What a download shows on standard error: a bar on a terminal, a line every ten seconds where that is piped."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_SECONDS = 10.0
"""Seconds between two lines where standard error is no terminal."""


class DownloadProgress(Protocol):
    """Is told of a download by those that make it. Counts are bytes of the whole file, those of earlier runs too."""

    def begin(self, what: str, total: int | None, done: int) -> None:
        """A download of `what` begins, of which `done` bytes are here; `total` is None where nobody knows it."""
        ...

    def reach(self, done: int) -> None:
        """`done` bytes are here."""
        ...

    def say(self, text: str) -> None:
        """Tell the user one line."""
        ...


class Quiet:
    """Progress that nobody looks at."""

    def begin(self, what: str, total: int | None, done: int) -> None:
        """Show nothing."""

    def reach(self, done: int) -> None:
        """Show nothing."""

    def say(self, text: str) -> None:
        """Show nothing."""


class Shown:
    """Progress on standard error, within a `with` block."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._what = ""
        self._total: int | None = None
        self._first = self._done = 0
        self._begun = self._said = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def begin(self, what: str, total: int | None, done: int) -> None:
        """Show the bar, or the first line."""
        self._close()
        self._what, self._total, self._first, self._done = what, total, done, done
        self._begun = self._said = time.monotonic()
        if self._live:
            self._bar = _bar()
            self._task = self._bar.add_task(what, total=total, completed=done)
            self._bar.start()
            return
        went_on = f", {amount(done)} of it are here already" if done else ""
        self.say(f"{what}: {amount(total) if total is not None else 'a file of unknown size'}{went_on}")

    def reach(self, done: int) -> None:
        """Move the bar, or say a line when the last one is ten seconds old."""
        self._done = done
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done)
        elif time.monotonic() - self._said >= LINE_SECONDS:
            self._said = time.monotonic()
            self.say(self._line())

    def say(self, text: str) -> None:
        """Print one line, above the bar where there is one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def _line(self) -> str:
        speed = (self._done - self._first) / max(1e-3, time.monotonic() - self._begun)
        if not self._total:
            return f"{self._what}: {amount(self._done)}, {amount(speed)}/s"
        left = f", {(self._total - self._done) / speed:.0f} s left" if speed else ""
        share = f"{100 * self._done / self._total:.0f} %"
        return f"{self._what}: {share}, {amount(self._done)} of {amount(self._total)}, {amount(speed)}/s{left}"

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    return Progress(*columns, console=Console(stderr=True))


def amount(count: float) -> str:
    """Bytes with the decimal unit that registries and disks use: 93 MB, 1.1 GB."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB" if count < 99.95 else f"{count:.0f} GB"
