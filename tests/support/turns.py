"""Loops of tests, bounded: an engine that makes no progress fails its test instead of hanging it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from quire.engine.client import StepReport

MOST = 20_000
"""Turns that no test comes near to."""


class Works(Protocol):
    """An engine or a scheduler."""

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do."""


class Polled(Protocol):
    """An engine in this process: `poll` runs a step."""

    def poll(self, timeout: float) -> StepReport | None:
        """Its report; None when there is nothing to do."""


def turns(more: Callable[[], object], most: int = MOST) -> Iterator[int]:
    """0, 1, ... while `more()` holds; AssertionError once that were more than `most`."""
    count = 0
    while more():
        assert count < most, f"still not done after {most} turns: no progress is made"
        yield count
        count += 1


def working(engine: Works, most: int = MOST) -> Iterator[int]:
    """`turns` while `engine` has work."""
    return turns(lambda: engine.has_work, most)


def reports(engine: Polled, most: int = MOST) -> Iterator[StepReport]:
    """What each step of `engine` reports, until it has nothing to do; AssertionError after more than `most`."""
    for _ in turns(lambda: True, most):
        report = engine.poll(0)
        if report is None:
            return
        yield report
