"""Sequences whose grammar is being made ready: they wait beside the queue, and hold up nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait

from quire.core.blame import of_request
from quire.core.errors import QuireError
from quire.core.sequence import Guide, Sequence
from quire.sched.queue import WaitingQueue

Make = Callable[[Sequence], "Future[Guide]"]
"""Begins to make the guide of a sequence, elsewhere."""


class Readying:
    """Has guides made by `make`; of sequences of one request one is made, and the others are of the same grammar."""

    def __init__(self, waiting: WaitingQueue) -> None:
        self.make: Make | None = None
        self._waiting = waiting
        self._under_way: dict[Sequence, Future[Guide]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def enter(self, seq: Sequence, siblings: Iterable[Sequence]) -> None:
        """Into the queue, or beside it until its grammar is ready."""
        if seq.request.grammar and seq.guide is None:
            known = next((each.guide for each in siblings if each.guide is not None), None)
            if known is None or seq.request.told:  # what it was told of is read before it runs
                assert self.make is not None, "the engine says how guides are made"
                self._under_way[seq] = self.make(seq)
                return
            try:
                seq.guide = known.anew()
            except BaseException as error:
                self._under_way[seq] = failed = Future[Guide]()
                failed.set_exception(error)
                return
        self._waiting.push(seq)

    def returned(self) -> list[tuple[Sequence, QuireError]]:
        """Put those that have their guide into the queue; the others, each with what is wrong."""
        done = [(seq, future) for seq, future in self._under_way.items() if future.done()]
        found: list[tuple[Sequence, QuireError]] = []
        for seq, future in done:
            error = future.exception()
            if error is None:
                del self._under_way[seq]
                seq.guide = future.result()
                self._waiting.push(seq)
            else:
                found.append((seq, of_request(error, "grammar")))
        return found

    def drop(self, seq: Sequence) -> bool:
        """Forget `seq`; whether it was waited for."""
        future = self._under_way.pop(seq, None)
        if future is not None:
            future.cancel()
        return future is not None

    def wait(self, seconds: float) -> None:
        """Until one has its guide, `seconds` at most."""
        wait(self._under_way.values(), seconds, return_when="FIRST_COMPLETED")
