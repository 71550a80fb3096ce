"""Progress bars on standard error, shown only when that is a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)


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
