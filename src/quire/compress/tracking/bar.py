"""Progress of a run on standard error: a bar with the time left on a terminal, else a line now and then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PERIOD = 10.0
"""Seconds between two lines of a log at least."""
MEASURING = "measuring"
"""Named as the next, it ends the bar: what follows has bars of its own, and two of them write over each other."""


@contextlib.contextmanager
def units_bar(total: int, done: int = 0, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Make a callback that counts one of `total` units as done and names the next.

    `done` units were done by an earlier run, and say nothing about how long the others take. `console`: standard error
    unless another is given.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _lines(total, done, console)
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total, completed=done)

        def count(following: str) -> None:
            if following == MEASURING:
                bar.stop()
                return
            bar.update(task, advance=1, description=following)

        yield count


def _lines(total: int, before: int, console: Console) -> Callable[[str], None]:
    """Count units for what is no terminal: nothing is printed of a run that is short."""
    done, began = before, time.monotonic()
    told = began

    def count(following: str) -> None:
        nonlocal done, told
        done, now = done + 1, time.monotonic()
        if following == MEASURING and now - began >= PERIOD:
            console.print(f"measuring what was made, {timedelta(seconds=round(now - began))} so far", highlight=False)
            return
        if now - told < PERIOD or done > total:
            return
        told, spent = now, now - began
        left = timedelta(seconds=round(spent / (done - before) * (total - done)))
        so_far = timedelta(seconds=round(spent))
        console.print(f"{done} of {total} done, next: {following}; {so_far} so far, about {left} left", highlight=False)

    return count
