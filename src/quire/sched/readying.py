"""Sequences whose grammar is being made ready: they wait beside the queue, and hold up nobody."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

from quire.core.errors import EngineFailure, QuireError
from quire.core.sequence import Guide, Sequence

Make = Callable[[Sequence], "Future[Guide]"]
"""Begins to make the guide of a sequence, elsewhere."""


class Readying:
    """Has guides made by `make`; of sequences of one request one is made, and the others are of the same grammar."""

    def __init__(self) -> None:
        self.make: Make | None = None
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
        if known is not None and not seq.request.told:  # what it was told of is read before it runs
            seq.guide = known.anew()
            return False
        self._under_way[seq] = future = self._make(seq)
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
                failed.append((seq, error if isinstance(error, QuireError) else _failed(error)))
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
        except Exception as error:
            failed = Future[Guide]()
            failed.set_exception(error)
            return failed

    def _came(self, seq: Sequence, future: Future[Guide]) -> None:
        self._made.append((seq, future))
        self._any.set()


def _failed(error: BaseException) -> QuireError:
    return EngineFailure(f"grammar: {type(error).__name__}: {error}")
