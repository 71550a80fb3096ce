"""Searches for cycles at the server's own moments."""

from __future__ import annotations

import gc
import weakref

from quire.server import garbage
from quire.server.garbage import Garbage


class Cycle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.own = self


def left_over() -> tuple[weakref.ref[Cycle], list[list[int]]]:
    """A cycle that nobody has, and enough new objects that a search is worth it."""
    return weakref.ref(Cycle()), [[] for _ in range(2 * garbage.NEW)]


def test_there_are_no_searches_but_its_own() -> None:
    assert gc.isenabled()
    with Garbage().seldom():
        assert not gc.isenabled()
        cycle, _new = left_over()
        assert cycle() is not None
    assert gc.isenabled()


def test_while_requests_are_served_it_searches_seldom() -> None:
    found = Garbage()
    with found.seldom():
        first, _new = left_over()
        found.look(idle=False)
        assert first() is None
        second, _newer = left_over()
        found.look(idle=False)
        assert second() is not None, "the last search is not a hundred times its own length ago"
        found.look(idle=True)
        assert second() is None


def test_where_nothing_is_new_it_does_not_search() -> None:
    found = Garbage()
    with found.seldom():
        gc.collect()
        cycle = weakref.ref(Cycle())
        found.look(idle=True)
        assert cycle() is not None
    gc.collect()
    assert cycle() is None
