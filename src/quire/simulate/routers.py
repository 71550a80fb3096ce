"""Who gets a request: the engine's own router, and plain ones to compare it with."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.request import Request
from quire.engine.processes.router import Ready, Router


class Routes(Protocol):
    """What `quire.engine.processes.router.Router` does, which is one of them."""

    def place(self, request: Request, ready: Ready) -> int:
        """The replica for a request, of those that are ready."""
        ...

    def left(self, replica: int) -> None:
        """A request has ended there, or went to another."""
        ...

    def forget(self, replica: int) -> None:
        """Forget what a replica holds: its cache is empty: it was started anew."""
        ...


class _Blind:
    """Looks at no cache; counts what is in flight."""

    def __init__(self, replicas: int, seed: int) -> None:
        self._flight = np.zeros(replicas, np.int64)
        self._rng, self._turn = random.Random(f"router {seed}"), -1

    def place(self, request: Request, ready: Ready) -> int:
        """Choose of those that are ready; of all where none is."""
        some = np.flatnonzero(ready)
        place = self._choose(some if len(some) else np.arange(len(self._flight)))
        self._flight[place] += 1
        return place

    def _choose(self, some: NDArray[np.int64]) -> int:
        raise NotImplementedError

    def left(self, replica: int) -> None:
        """One less in flight."""
        self._flight[replica] -= 1

    def forget(self, replica: int) -> None:
        """Nothing was known."""


class RandomRouter(_Blind):
    """Any."""

    def _choose(self, some: NDArray[np.int64]) -> int:
        return int(some[self._rng.randrange(len(some))])


class RoundRobin(_Blind):
    """One after the other."""

    def _choose(self, some: NDArray[np.int64]) -> int:
        at = int(np.searchsorted(some, self._turn, side="right"))
        self._turn = int(some[at % len(some)])
        return self._turn


class LeastLoaded(_Blind):
    """The one with the fewest requests in flight."""

    def _choose(self, some: NDArray[np.int64]) -> int:
        return int(some[self._flight[some].argmin()])


class PowerOfTwo(_Blind):
    """The better of two that chance names (the power of two choices, Mitzenmacher 2001)."""

    def _choose(self, some: NDArray[np.int64]) -> int:
        pair = [int(some[self._rng.randrange(len(some))]) for _ in range(2)]
        return min(pair, key=lambda each: int(self._flight[each]))


ROUTERS: dict[str, type[_Blind] | None] = {
    "prefix": None, "random": RandomRouter, "round-robin": RoundRobin, "least-requests": LeastLoaded, "two-choices":
    PowerOfTwo,
}  # fmt: skip
"""`prefix`: the engine's own. The others are baselines that quire does not have."""


def router_of(name: str, replicas: int, block_size: int, blocks: int, seed: int) -> Routes:
    """The router of that name."""
    kind: Callable[[int, int], Routes] | None = ROUTERS[name]
    return Router(replicas, block_size, blocks) if kind is None else kind(replicas, seed)
