"""Progress on standard error: bars where that is a terminal; of long commands, lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

LINE_SECONDS = 10.0


class LongProgress(Progress):
    """Bars on a terminal; elsewhere a line for each task that goes on, one in `LINE_SECONDS` at most."""

    def __init__(self, *columns: str | ProgressColumn, transient: bool = False) -> None:
        console = _console()
        super().__init__(*columns, console=console, transient=transient, disable=not console.is_terminal)
        self._said = time.monotonic()

    def update(self, task_id: TaskID, **facts: Any) -> None:
        """Change a task as rich's does."""
        super().update(task_id, **facts)
        self._say(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Count more of a task as done."""
        super().advance(task_id, advance)
        self._say(task_id)

    def _say(self, task_id: TaskID) -> None:
        now = time.monotonic()
        if not self.disable or now - self._said < LINE_SECONDS:
            return
        self._said = now
        task = self._tasks[task_id]
        done = f": {task.completed:.0f} of {task.total:.0f}" if task.total else ""
        print(f"{task.description}{done}, after {task.elapsed or 0.0:.0f} s", file=sys.stderr, flush=True)


def _console() -> Console:
    return Console(stderr=True)


@contextlib.contextmanager
def loading_bar(show: bool = True) -> Iterator[Callable[[int, int, str], None]]:
    """A callback (done bytes, total bytes, what) that draws how far a model is loaded."""
    console = _console()
    columns = (
        TextColumn("loading {task.description}"), BarColumn(), TaskProgressColumn(), DownloadColumn(),
        TransferSpeedColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not (show and console.is_terminal)) as bar:
        task = bar.add_task("model", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


@contextlib.contextmanager
def counting_bar(total: int, what: str, show: bool = True) -> Iterator[Callable[[], None]]:
    """A callback that counts one of `total` things as done."""
    console = _console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not (show and console.is_terminal)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
