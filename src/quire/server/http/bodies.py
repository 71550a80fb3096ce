"""How much of bodies may be in memory: bytes that were read of requests whose work on them is not done."""

from __future__ import annotations

from quire.core.errors import Overloaded


class Bodies:
    """Those of all requests together: `limit` bytes at most, but for one that is alone."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0


class Part:
    """Those of one request, until it says that it keeps no more of its body than fields."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._held = 0

    @property
    def size(self) -> int:
        """Bytes of it that are counted now."""
        return self._held

    def take(self, count: int) -> None:
        """Count bytes that were read. `Overloaded` where others hold too many."""
        others = self._bodies.held - self._held
        if others and self._bodies.held + count > self._bodies.limit:
            raise Overloaded(
                f"bodies of other requests take {others / 1e6:.0f} MB, and there is no room for this one "
                f"(--max-bodies-gb {self._bodies.limit / 1e9:g})"
            )
        self._held += count
        self._bodies.held += count

    def release(self) -> None:
        """What was read is no more."""
        self._bodies.held -= self._held
        self._held = 0
