"""What structured output plans: sequences wait for their grammars, and those whose grammars take long have turns."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, ClassVar, TypeGuard

from quire.core.blame import of_request
from quire.core.errors import QuireError
from quire.core.plan import Chunk
from quire.core.request import Request
from quire.core.sequence import Guide, Sequence, Status
from quire.features.feature import SchedulerFeature
from quire.sched.policy import Rank

SLOW = 2e-3
"""Seconds for a token of a sequence, above which it is slow: ordinary schemas take some 0.1 ms."""
SHARE = 0.2
"""Of the time that steps take is left to slow ones while there are others."""
Make = Callable[[Sequence], "Future[Guide]"]
"""Begins to make the guide of a sequence, elsewhere."""


class GrammarQueue:
    """Where sequences wait for their grammars.

    It has guides made by `make`; of sequences of one request one is made, and the others are of the same grammar.
    """

    status: ClassVar[Status] = Status.WAITING_FOR_GRAMMAR

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
        if known is not None and not seq.request.emitted:  # what was emitted is read before it runs
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
        """Sequences that have their guide now, and the others that are done, each with what is wrong; these are
        dropped."""
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


class SlowGuides(SchedulerFeature):
    """Which sequences whose grammars take long may have a step: others wait for one of them at a time, and seldom.

    A step waits for the masks of all its rows, and for what reads the tokens that were drawn. A grammar may have been
    written to make that long. What a sequence says is the same, whenever it has its steps. `clock`: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._turns = 0
        self._rest = 0.0

    def concerns(self, request: Request) -> bool:
        """One with a grammar."""
        return bool(request.grammar)

    def limit(self, counts: dict[Sequence, int], rank: Callable[[Sequence], Rank]) -> Iterable[Sequence]:
        """The next step should do without the slow ones but one of them."""
        everyone = list(counts)
        slow = [(guide.turn, i) for i, seq in enumerate(everyone) if _is_slow(guide := seq.guide)]
        if not slow:
            return ()
        chosen = -1 if len(slow) < len(everyone) and self._clock() < self._rest else min(slow)[1]
        counts |= {everyone[i]: 0 for _, i in slow if i != chosen}
        return ()

    def planned(self, chunks: Iterable[Chunk]) -> dict[str, Any]:
        """What a slow one makes the step longer, others have for themselves then."""
        for chunk in chunks:
            if (guide := chunk.seq.guide) is not None and _is_slow(guide):
                self._turns += 1
                guide.turn = self._turns
                self._rest = self._clock() + guide.seconds / SHARE
        return {}


def _is_slow(guide: Guide | None) -> TypeGuard[Guide]:
    return guide is not None and guide.seconds > SLOW
