"""Sequences whose grammar is being made ready: they wait beside the queue, and hold up nobody."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

from quire.core.blame import of_request
from quire.core.errors import QuireError
from quire.core.sequence import Guide, Sequence

Make = Callable[[Sequence], "Future[Guide]"]
"""Begins to make the guide of a sequence, elsewhere."""


class Readying:
    """Has guides made by `make`; of sequences of one request one is made, and the others are of the same grammar."""

    def __init__(self, make: Make | None = None) -> None:
        self.make = make
        self._under_way: dict[Sequence, Future[Guide]] = {}
        self._made = deque[tuple[Sequence, "Future[Guide]"]]()  # appended to by whoever makes them
        self._any = threading.Event()

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, seq: Sequence, siblings: Iterable[Sequence]) -> bool:
        """Whether `seq` is to wait for its grammar."""
        if not seq.request.grammar or seq.guide is not None:
            return False
        known = next((each.guide for each in siblings if each.guide is not None), None)
        future: Future[Guide]
        if known is not None and not seq.request.told:  # what it was told of is read before it runs
            try:
                seq.guide = known.anew()
                return False
            except BaseException as error:
                future = _failed(error)
        else:
            future = self._make(seq)
        self._under_way[seq] = future
        future.add_done_callback(partial(self._came, seq))
        return True

    def returned(self) -> tuple[list[Sequence], list[tuple[Sequence, QuireError]]]:
        """Those that have their guide now, and the others that are done, each with what is wrong; these are dropped."""
        ready, failed = list[Sequence](), list[tuple[Sequence, QuireError]]()
        self._any.clear()
        while self._made:
            seq, future = self._made.popleft()
            if self._under_way.get(seq) is not future:
                continue
            error = future.exception()
            if error is None:
                del self._under_way[seq]
                seq.guide = future.result()
                ready.append(seq)
            else:
                failed.append((seq, of_request(error, "grammar")))
        return ready, failed

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence that waits."""
        self._under_way.pop(seq).cancel()

    def wait(self, seconds: float) -> None:
        """Until one is done, `seconds` at most."""
        self._any.wait(seconds)

    def _make(self, seq: Sequence) -> Future[Guide]:
        """One that cannot even be begun has failed, like any other."""
        assert self.make is not None, "the engine says how guides are made"
        try:
            return self.make(seq)
        except BaseException as error:
            return _failed(error)

    def _came(self, seq: Sequence, future: Future[Guide]) -> None:
        self._made.append((seq, future))
        self._any.set()


def _failed(error: BaseException) -> Future[Guide]:
    future = Future[Guide]()
    future.set_exception(error)
    return future
