"""How far a pipeline is: a bar with the time left on standard error, shown only when that is a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextlib.contextmanager
def units_bar(total: int, done: int = 0, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """A callback that counts one of `total` units as done and names the next; `done` were done by an earlier run, and
    say nothing about how long the others take. `console`: standard error unless another is given."""
    console = console or Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=total, completed=done)

        def count(following: str) -> None:
            bar.update(task, advance=1, description=following)

        yield count
