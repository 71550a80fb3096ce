"""What the last stage of a pipeline makes of each step, on its way back to the first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Thread

from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.parallel.comm import Comm

NOTHING = 1
"""Numbers that come back of a step without logits: that it is done."""


@dataclass(frozen=True)
class ReplyForm:
    """What comes back of a step: logits of `vocabulary` columns, in pieces of `most` rows.

    `part`: where the first stage has some of the head, what makes its columns of rows that the head reads, which are
    `width` numbers and come first; then the last stage's columns come.
    """

    vocabulary: int
    most: int
    width: int = 0
    columns: int = 0
    part: Callable[[Array], Array] | None = None


class Reply:
    """What comes back of one step of `rows` logits, in one piece."""

    def __init__(self, rows: Array, logits: Array) -> None:
        """`rows` [R, width] that the head reads, and `logits` [R, columns] of the last stage: places for them."""
        self.rows, self.logits = rows, logits
        self.known, self.done = Event(), Event()
        self.error: ValueError | None = None


class Replies:
    """Replies of the last stage are taken as they come, by a thread of their own: the last stage never waits for a
    busy first one, so that no circle of stages can wait for each other.

    A step of more than `ReplyForm.most` rows comes in several pieces, of which none is kept: nothing may be under way
    behind it. `waited`: seconds that the first stage had nothing to do but wait.
    """

    def __init__(self, ops: Ops, comm: Comm, form: ReplyForm, steps: int) -> None:
        """`comm`: this thread's alone; `steps`: under way at one time at most."""
        self._comm, self._form, self.waited = comm, form, 0.0
        self._ops = ops.beside()
        others = form.vocabulary - form.columns
        self._places = [(ops.zeros((form.most, form.width)), ops.zeros((form.most, others))) for _ in range(steps + 1)]
        self._joined = ops.zeros((form.most, form.vocabulary if form.columns else 0))
        self._turn, self._asked = 0, SimpleQueue[Reply | None]()
        self._thread = Thread(target=self._take, daemon=True)
        self._thread.start()

    def expect(self, rows: int) -> Iterable[Array]:
        """The logits [R, V] of a step that was told to all stages just now, each valid until the next is asked for."""
        if rows > self._form.most:
            return self._pieces(rows)
        self._turn = (self._turn + 1) % len(self._places)
        places = self._places[self._turn]
        reply = Reply(places[0][:rows], places[1][:rows])
        self._asked.put(reply)
        return self._whole(reply)

    def _whole(self, reply: Reply) -> Iterator[Array]:
        own = None
        if self._form.part is not None:
            self._wait(reply, reply.known)
            own = self._form.part(reply.rows) if len(reply.rows) else None
        self._wait(reply, reply.done)
        yield reply.logits if own is None else self._join(own, reply.logits)

    def _join(self, own: Array, others: Array) -> Array:
        out, at = self._joined[: len(own)], self._form.columns
        out[:, :at], out[:, at:] = own, others
        return out

    def _wait(self, reply: Reply, what: Event) -> None:
        begin = time.perf_counter()
        what.wait()
        self.waited += time.perf_counter() - begin
        if reply.error is not None:
            raise reply.error

    def _pieces(self, rows: int) -> Iterator[Array]:
        form, place = self._form, self._places[0][1]
        read = self._ops.zeros((rows, form.width))
        if form.part is not None:
            self._receive(read)
        for at in range(0, rows, form.most):
            count = min(form.most, rows - at)
            own = None if form.part is None else form.part(read[at : at + count])
            others = self._receive(place[:count])
            yield others if own is None else self._join(own, others)

    def _receive(self, out: Array) -> Array:
        return self._comm.recv(self._ops, out, self._comm.world - 1)

    def _take(self) -> None:
        while (reply := self._asked.get()) is not None:
            try:
                if self._form.part is not None:
                    self._receive(reply.rows)
                    reply.known.set()
                self._receive(reply.logits if len(reply.logits) else self._ops.zeros((NOTHING,)))
            except ValueError as error:
                reply.error = error
            reply.known.set()
            reply.done.set()

    def close(self) -> None:
        """End the thread."""
        self._comm.leave()
        self._asked.put(None)
        self._thread.join()


def give_back(ops: Ops, comm: Comm, pieces: Iterable[Array]) -> None:
    """The last stage's side: the logits of a step to the first one."""
    for piece in pieces:
        comm.send(ops.beside(), piece if len(piece) else ops.zeros((NOTHING,)), 0)
