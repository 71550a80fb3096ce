"""What the last stage of a pipeline makes of each step, on its way back to the first."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from threading import Event, Thread

import torch
from torch import Tensor

from quire.core.config import DeviceConfig
from quire.ops.backend import select
from quire.parallel.shared import SharedComm

NOTHING = 1
"""Numbers that come back of a step without logits: that it is done."""


class Reply:
    """The logits [rows, V] of one step, in one piece, once they are there."""

    def __init__(self, replies: Replies, out: Tensor) -> None:
        self.out, self.done = out, Event()
        self.error: ValueError | None = None
        self._replies = replies

    def __iter__(self) -> Iterator[Tensor]:
        begin = time.perf_counter()
        self.done.wait()
        self._replies.waited += time.perf_counter() - begin
        if self.error is not None:
            raise self.error
        yield self.out


class Replies:
    """They are taken as they come, by a thread of their own: the last stage never waits for a busy first one, so that
    no circle of stages can wait for each other.

    `most` rows come in one piece. A step with more comes in several, of which none is kept: nothing may be under way
    behind it. `waited`: seconds that the first stage had nothing to do but wait.
    """

    def __init__(self, comm: SharedComm, vocabulary: int, most: int, steps: int) -> None:
        """`comm`: this thread's alone; `steps`: under way at one time at most."""
        self._comm, self._most, self.waited = comm, most, 0.0
        self._vocabulary = vocabulary
        self._ops = select(DeviceConfig(device="reference"))  # what is received here belongs to no recording
        self._places = [torch.empty(most, vocabulary) for _ in range(steps + 1)]
        self._turn, self._asked = 0, SimpleQueue[Reply | None]()
        self._thread = Thread(target=self._take, daemon=True)
        self._thread.start()

    def expect(self, rows: int) -> Iterable[Tensor]:
        """The logits of a step that was told to all stages just now."""
        if rows > self._most:
            return self._pieces(rows)
        self._turn = (self._turn + 1) % len(self._places)
        reply = Reply(self, self._places[self._turn][:rows])
        self._asked.put(reply)
        return reply

    def _pieces(self, rows: int) -> Iterator[Tensor]:
        place = self._places[0]
        for at in range(0, rows, self._most):
            begin = time.perf_counter()
            piece = self._receive(place[: min(self._most, rows - at)])
            self.waited += time.perf_counter() - begin
            yield piece

    def _receive(self, out: Tensor) -> Tensor:
        source = self._comm.world - 1
        if len(out):
            return self._comm.recv(self._ops, out, source)
        self._comm.recv(self._ops, torch.empty(NOTHING), source)
        return out

    def _take(self) -> None:
        while (reply := self._asked.get()) is not None:
            try:
                self._receive(reply.out)
            except ValueError as error:
                reply.error = error
            reply.done.set()

    def close(self) -> None:
        """End the thread."""
        self._comm.leave()
        self._asked.put(None)
        self._thread.join()


def give_back(comm: SharedComm, pieces: Iterable[Tensor]) -> None:
    """The last stage's side: the logits of a step to the first one."""
    ops = select(DeviceConfig(device="reference"))
    for piece in pieces:
        comm.send(ops, piece if len(piece) else torch.zeros(NOTHING), 0)
