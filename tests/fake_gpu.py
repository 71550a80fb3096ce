"""A device that pretends: what is queued happens only when somebody waits for it, in an order the device may choose.

So a host that reads or rewrites memory too early sees or makes wrong numbers, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.ops.runtime import Copies, Fetched, QueueEvent


class Point:
    """A place in a queue; `wait` runs the queues until it is reached."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self.reached = False
        self.runtime = runtime

    def wait(self) -> None:
        self.runtime.waits += not self.reached
        self.runtime.run_until(lambda: self.reached)


class FakeRuntime:
    """Queues of closures. `eager`: "side" runs copies as soon as they may, "main" as late as it can."""

    def __init__(self, eager: str = "side", free: int = 1 << 30, total: int = 1 << 31, needed: int = 1 << 20) -> None:
        self.main: list[Callable[[], bool]] = []
        self.side: list[Callable[[], bool]] = []
        self.third: list[Callable[[], bool]] = []
        self.order = ("third", "side", "main") if eager == "side" else ("main", "side", "third")
        self.waits = 0
        self.captured: list[Callable[[], Tensor]] = []
        self._memory, self._needed = (free, total), needed

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            assert any(self._one(name) for name in self.order), "the queues wait for each other"

    def _one(self, name: str) -> bool:
        """Run the first thing of a queue, if it may run now."""
        queue: list[Callable[[], bool]] = getattr(self, name)
        if queue and queue[0]():
            queue.pop(0)
            return True
        return False

    def queue(self, work: Callable[[], object]) -> None:
        """A kernel on the main queue."""

        def run() -> bool:
            work()
            return True

        self.main.append(run)

    def _point(self, queue: list[Callable[[], bool]]) -> Point:
        point = Point(self)

        def reach() -> bool:
            point.reached = True
            return True

        queue.append(reach)
        return point

    def _waiting_for(self, queue: list[Callable[[], bool]], point: Point) -> None:
        queue.append(lambda: point.reached)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def mark(self) -> Point:
        return self._point(self.main)

    def send(self, copies: Copies, after: QueueEvent | None) -> Point:
        self._waiting_for(self.side, after if isinstance(after, Point) else self.mark())
        for target, source in copies:
            self.side.append(lambda target=target, source=source: target.copy_(source) is target)
        done = self._point(self.side)
        self._waiting_for(self.main, done)
        return done

    def ahead(self, copies: Copies) -> Point:
        self._waiting_for(self.third, self.mark())
        for target, source in copies:
            self.third.append(lambda target=target, source=source: target.copy_(source) is target)
        return self._point(self.third)

    def wait_for(self, mark: QueueEvent) -> None:
        assert isinstance(mark, Point)
        self._waiting_for(self.main, mark)

    def place(self, copies: Copies) -> None:
        for target, source in copies:
            self.queue(lambda target=target, source=source: target.copy_(source))

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        hosts = [torch.full_like(t, 77) for t in tensors]
        self.place(list(zip(hosts, tensors, strict=True)))
        done = self.mark()

        def wait() -> list[NDArray[Any]]:
            done.wait()
            return [host.numpy() for host in hosts]

        return wait

    def capture(self, fn: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        output = fn()
        self.captured.append(fn)
        return lambda: self.queue(lambda: output.copy_(fn())), output

    def memory(self) -> tuple[int, int]:
        return self._memory

    def peak(self, step: Callable[[], object]) -> int:
        step()
        return self._needed
