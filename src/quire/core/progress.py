"""Progress of long work on standard error: bars with share and time left on a terminal, elsewhere a line every 10 s.

    with stage("calibration", total=len(rows)) as at:
        for row in rows:
            ...
            at.advance()

Stages nest: one that is opened while another is open is drawn below it, so no two bars write over each other, and a
function that takes long need not know who called it. Nothing is printed of work that is shorter than `PERIOD` where
standard error is no terminal, and nothing at all inside `silenced`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PERIOD = 10.0
"""Seconds between two lines."""
UNITS = ("B", "kB", "MB", "GB", "TB")


class Stage:
    """A part of long work. `done` of `total` things are finished, `total` None where nobody knows how many there are.

    `before`: those of an earlier run, which say nothing about how long the others take. `unit`: "bytes" is shown with
    a unit and a rate.
    """

    def __init__(self, display: Display, what: str, total: float | None, before: float, unit: str) -> None:
        self.what, self.total, self.before, self.unit = what, total, before, unit
        self.done, self.note = before, ""
        self.began = display.clock()
        self.task: TaskID | None = None
        self._display = display

    def advance(self, count: float = 1, note: str | None = None) -> None:
        """Count `count` more things as done; `note` says what is next, or how it goes."""
        self.update(self.done + count, note=note)

    def update(self, done: float | None = None, total: float | None = None, note: str | None = None) -> None:
        """Set what is given."""
        self.done = self.done if done is None else done
        self.total = self.total if total is None else total
        self.note = self.note if note is None else note
        self._display.changed(self)

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._display.say(line)

    @property
    def share(self) -> float | None:
        """The part of the work that is done, from 0 to 1; None where the total is not known."""
        return min(1.0, self.done / self.total) if self.total else None

    def count(self) -> str:
        """What is done of how much, in words; "" where there is nothing to count."""
        if self.unit == "bytes":
            spent = self._display.clock() - self.began
            rate = f", {_size((self.done - self.before) / spent)}/s" if spent >= 1 else ""
            return (f"{_size(self.done)} of {_size(self.total)}" if self.total else _size(self.done)) + rate
        if self.total:
            return f"{self.done:,.0f} of {self.total:,.0f}"
        return f"{self.done:,.0f}" if self.done else ""

    def left(self) -> float | None:
        """Seconds that are left if the rest goes as what was done; None where nothing says so."""
        made = self.done - self.before
        if not self.total or made <= 0:
            return None
        return max(0.0, (self._display.clock() - self.began) / made * (self.total - self.done))

    def words(self) -> str:
        """The stage in a few words: what, how much of it, what is next."""
        share = "" if self.share is None else f" ({self.share:.0%})"
        count = self.count()
        return self.what + (f" {count}{share}" if count else "") + (f", {self.note}" if self.note else "")


class Display:
    """Where the stages that are open are shown: one for a process, from the first stage to its end.

    `file` and `terminal`: what is written to, and whether it can redraw lines. `clock`: seconds.
    """

    def __init__(
        self,
        file: IO[str] | None = None,
        terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        quiet: bool = False,
    ) -> None:
        self.file, self.clock, self.quiet = file or sys.stderr, clock, quiet
        self.stages: list[Stage] = []
        self._told = clock()
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._bars: Progress | None = None
        if quiet:
            return
        if _is_terminal(self.file) if terminal is None else terminal:
            self._bars = _bars(self.file)
            self._bars.start()
        else:
            threading.Thread(target=self._tick, name="progress", daemon=True).start()

    def open(self, what: str, total: float | None = None, before: float = 0, unit: str = "") -> Stage:
        """Begin a stage inside those that are open."""
        made = Stage(self, what, total, before, unit)
        with self._lock:
            if self._bars is not None:
                name = "  " * len(self.stages) + what
                made.task = self._bars.add_task(name, total=total, count="", note="", left="")
                self._bars.update(made.task, completed=before)
            self.stages.append(made)
        return made

    def close(self, ended: Stage) -> None:
        """End a stage; the display ends with the last."""
        with self._lock:
            self.stages.remove(ended)
            if self._bars is not None and ended.task is not None:
                self._bars.remove_task(ended.task)
            spent = self.clock() - ended.began
            if self._bars is None and spent >= PERIOD:
                self.say(f"{ended.what} done in {_time(spent)}")
        if not self.stages:
            self._ended.set()
            if self._bars is not None:
                self._bars.stop()

    def changed(self, stage: Stage) -> None:
        """Show a stage anew."""
        if self._bars is not None and stage.task is not None:
            note, seconds = f" {stage.note}" if stage.note else "", stage.left()
            left = "" if seconds is None else f"about {_time(seconds)} left"
            self._bars.update(
                stage.task, completed=stage.done, total=stage.total, count=stage.count(), note=note, left=left
            )
        elif self.clock() - self._told >= PERIOD:
            self.tell()

    def say(self, line: str) -> None:
        """Print a line that stays, above what is drawn."""
        if self.quiet:
            return
        if self._bars is not None:
            self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        with self._lock:
            print(line, file=self.file, flush=True)

    def tell(self) -> None:
        """Print how far the open stages are, in a line."""
        with self._lock:
            self._told = self.clock()
            if self.stages and not self.quiet:
                self.say(self.line())

    def line(self) -> str:
        """What all open stages do, the outermost first, and how long it takes."""
        counted = [stage for stage in self.stages if stage.left() is not None]
        spent = self.clock() - self.stages[0].began
        left = f", about {_time(counted[0].left() or 0.0)} left" if counted else ""
        of = f" for {counted[0].what}" if counted and counted[0] is not self.stages[0] else ""
        return f"{'; '.join(stage.words() for stage in self.stages)}; {_time(spent)} so far{left}{of}"

    def _tick(self) -> None:
        """Tell of work that reports nothing itself for a long time."""
        while not self._ended.wait(PERIOD / 4):
            if self.clock() - self._told >= PERIOD:
                with contextlib.suppress(ValueError, OSError):  # the file was closed meanwhile
                    self.tell()


_display: Display | None = None
_silent = 0
_opening = threading.Lock()


@contextlib.contextmanager
def stage(
    what: str, total: float | None = None, *, done: float = 0, unit: str = "", show: bool = True
) -> Iterator[Stage]:
    """Show a stage of work while the context lasts, inside the stage that is open, if there is one.

    `total` None: nobody knows how much there is. `done`: what an earlier run did of it. `unit`: "bytes" or "".
    `show` False: nothing is drawn.
    """
    global _display
    with _opening:
        if not show or _silent:
            shown = Display(quiet=True)
        elif _display is None:
            shown = _display = Display()
        else:
            shown = _display
        opened = shown.open(what, total, done, unit)
    try:
        yield opened
    finally:
        with _opening:
            shown.close(opened)
            if shown is _display and not shown.stages:
                _display = None


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Show no progress while the context lasts."""
    global _silent
    _silent += 1
    try:
        yield
    finally:
        _silent -= 1


@contextlib.contextmanager
def named_stages() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a callback (what, done, of how much), each new `what` of which begins a stage and ends the one before."""
    with contextlib.ExitStack() as until:
        at: Stage | None = None

        def tell(what: str, done: int, total: int) -> None:
            nonlocal at
            if at is None or at.what != what:
                until.close()
                at = until.enter_context(stage(what, total))
            at.update(done)

        yield tell


@contextlib.contextmanager
def loading_bar(show: bool = True) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a callback (done bytes, total bytes, what) that draws how far a model is loaded."""
    with stage("loading model", unit="bytes", show=show) as at:
        yield lambda done, total, what: at.update(done, total, what)


@contextlib.contextmanager
def counting_bar(total: int, what: str, show: bool = True) -> Iterator[Callable[[], None]]:
    """Yield a callback that counts one of `total` things as done."""
    with stage(what, total, show=show) as at:
        yield at.advance


def _is_terminal(file: IO[str]) -> bool:
    if not file.isatty():
        return False
    from rich.console import Console

    return not Console(file=file).is_dumb_terminal


def _bars(file: IO[str]) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), TaskProgressColumn(),
        TextColumn("{task.fields[count]}{task.fields[note]}", markup=False), TimeElapsedColumn(),
        TextColumn("{task.fields[left]}", markup=False),
    )  # fmt: skip
    return Progress(*columns, console=Console(file=file, force_terminal=True), transient=True)


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _size(count: float) -> str:
    for unit in UNITS[:-1]:
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} {UNITS[-1]}"
