"""Which of several replicas gets a request: the one whose cache holds most of its prompt, unless others have less work.

Loads are bounded as in consistent hashing with bounded loads (Mirrokni et al. 2018): a cache is followed only while
its replica has not much more in flight than the mean.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from quire.core.request import Request

FOLLOWED = 0.5
"""Share of a prompt that a replica must hold for the request to follow it: a system prompt alone is soon everywhere."""
BOUND = 1.25
"""In flight at a replica that is followed, beside the mean; two more are always allowed."""
HALF_LIFE = 200
"""Requests after which placed work counts half in who has had least."""


class Router:
    """Knows what it sent where. `blocks` of `block_size` tokens are what a replica remembers at most."""

    def __init__(self, replicas: int, block_size: int, blocks: int) -> None:
        self._size, self._blocks = block_size, blocks
        self._held: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(replicas)]
        self._work = [0.0] * replicas
        self.in_flight = [0] * replicas

    def place(self, request: Request, ready: Sequence[bool]) -> int:
        """The replica for `request`; one that is not `ready` only where none is. Counted until `left`."""
        some = [i for i, is_ready in enumerate(ready) if is_ready] or list(range(len(self._held)))
        keys = list(self._keys(request))
        mean = (sum(self.in_flight[i] for i in some) + 1) / len(some)
        held = {i: self._matched(i, keys) for i in some}
        best = max(some, key=lambda i: (held[i], -self.in_flight[i], -self._work[i]))
        follows = held[best] * self._size > FOLLOWED * len(request.prompt)
        if not follows or self.in_flight[best] >= BOUND * mean + 2:
            best = min(some, key=lambda i: (self.in_flight[i] > mean, self._work[i]))
        self._note(best, keys)
        new = len(request.prompt) - held[best] * self._size + request.params.n * (request.params.max_tokens or 0)
        self._work = [each * 0.5 ** (1 / HALF_LIFE) for each in self._work]
        self._work[best] += max(1, new)
        self.in_flight[best] += 1
        return best

    def left(self, replica: int) -> None:
        """A request has ended there, or went to another."""
        self.in_flight[replica] -= 1

    def forget(self, replica: int) -> None:
        """Its cache is empty: it was started anew."""
        self._held[replica].clear()

    def _keys(self, request: Request) -> Iterator[int]:
        """A chain of the hashes of whole blocks, which differs by adapter and salt."""
        key = hash((request.adapter, request.cache_salt))
        for at in range(0, len(request.prompt) - self._size + 1, self._size):
            key = hash((key, request.prompt[at : at + self._size]))
            yield key

    def _matched(self, replica: int, keys: Sequence[int]) -> int:
        held = self._held[replica]
        return next((i for i, key in enumerate(keys) if key not in held), len(keys))

    def _note(self, replica: int, keys: Sequence[int]) -> None:
        held = self._held[replica]
        for key in reversed(keys):
            held[key] = None
            held.move_to_end(key)
        while len(held) > self._blocks:
            held.popitem(last=False)
