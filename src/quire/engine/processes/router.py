"""Which of several replicas gets a request: the one whose cache holds most of its prompt, unless others have less work.

Loads are bounded as in consistent hashing with bounded loads (Mirrokni et al. 2018): a cache is followed only while
its replica has not much more in flight than the mean.

A choice costs some 20 microseconds beside a thousand replicas: who holds what is looked up by block, and the rest are
sums over arrays. The same requests are placed the same in every process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from quire.core.request import Request

FOLLOWED = 0.5
"""Share of a prompt that a replica must hold for the request to follow it: a system prompt alone is soon everywhere."""
BOUND = 1.25
"""In flight at a replica that is followed, beside the mean; two more are always allowed."""
HALF_LIFE = 200
"""Requests after which placed work counts half in who has had least."""
Ready = Sequence[bool] | NDArray[np.bool_]
"""Which replicas may get a request."""


def suited(ready: Ready, prefill: int, started: bool) -> Ready:
    """Choose of those that are ready, which are to take a request whose prompt was computed (`started`) or was not.

    The first `prefill` compute prompts and the others go on with them; where none of a kind runs the others do both.
    """
    if not prefill:
        return ready
    some = [bool(each) and started == (i >= prefill) for i, each in enumerate(ready)]
    return some if any(some) else ready


class Router:
    """Knows what it sent where. `blocks` of `block_size` tokens are what a replica remembers at most."""

    def __init__(self, replicas: int, block_size: int, blocks: int) -> None:
        self._size, self._blocks = block_size, blocks
        self._held: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(replicas)]
        self._alone = [(i,) for i in range(replicas)]
        self._holders: dict[int, tuple[int, ...]] = {}  # most blocks have one: these share its tuple
        self._work = np.zeros(replicas)
        self.in_flight = np.zeros(replicas, np.int64)

    def place(self, request: Request, ready: Ready) -> int:
        """The replica for `request`; one that is not `ready` only where none is. Counted until `left`."""
        some = np.asarray(ready, bool)
        if not some.any():
            some = np.ones_like(some)
        keys = list(self._keys(request))
        mean = (int(self.in_flight[some].sum()) + 1) / int(some.sum())
        best = self._holds_most(keys, some, FOLLOWED * len(request.prompt))
        if best is None or self.in_flight[best] >= BOUND * mean + 2:
            best = int(np.where(some & (self.in_flight <= mean), self._work, np.inf).argmin())
        new = len(request.prompt) - self._matched(best, keys) * self._size
        self._note(best, keys)
        self._work *= 0.5 ** (1 / HALF_LIFE)
        self._work[best] += max(1, new + request.params.n * (request.params.max_tokens or 0))
        self.in_flight[best] += 1
        return best

    def left(self, replica: int) -> None:
        """A request has ended there, or went to another."""
        self.in_flight[replica] -= 1

    def forget(self, replica: int) -> None:
        """Note that a replica's cache is empty: it was started anew."""
        for key in self._held[replica]:
            self._drop(replica, key)
        self._held[replica].clear()

    def _keys(self, request: Request) -> Iterator[int]:
        """A chain of the hashes of whole blocks, which differs by adapter and salt."""
        key = crc32(f"{len(request.adapter)} {request.adapter}{request.cache_salt}".encode())
        for at in range(0, len(request.prompt) - self._size + 1, self._size):
            key = hash((key, request.prompt[at : at + self._size]))
            yield key

    def _holds_most(self, keys: Sequence[int], some: NDArray[np.bool_], least: float) -> int | None:
        """Who of `some` holds most of `keys`, and more than `least` tokens; of equals, who has least to do.

        Whoever holds a block holds those before it: they were used whenever it was, and are dropped later.
        """
        for count in range(len(keys), 0, -1):
            if count * self._size <= least:
                break
            found = [i for i in self._holders.get(keys[count - 1], ()) if some[i]]
            if found:
                return min(found, key=lambda i: (self.in_flight[i], self._work[i], i))
        return None

    def _matched(self, replica: int, keys: Sequence[int]) -> int:
        held = self._held[replica]
        return next((i for i, key in enumerate(keys) if key not in held), len(keys))

    def _note(self, replica: int, keys: Sequence[int]) -> None:
        held, holders = self._held[replica], self._holders
        for key in reversed(keys):
            if key not in held:
                holders[key] = (*holders[key], replica) if key in holders else self._alone[replica]
            held[key] = None
            held.move_to_end(key)
        while len(held) > self._blocks:
            self._drop(replica, held.popitem(last=False)[0])

    def _drop(self, replica: int, key: int) -> None:
        rest = tuple(i for i in self._holders[key] if i != replica)
        if rest:
            self._holders[key] = rest if len(rest) > 1 else self._alone[rest[0]]
        else:
            del self._holders[key]
