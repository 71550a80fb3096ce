"""What a backend that `queues` asks of its device: streams, events, pinned memory, graphs, memory left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire.ops.arrays import Fetched

Copies = Sequence[tuple[Tensor, Tensor]]
"""(target, source) of copies that are queued."""


class QueueEvent(Protocol):
    """A point in a queue of work."""

    def wait(self) -> None:
        """Stop the host until the device has come that far."""
        ...


class Runtime(Protocol):
    """A device with a main queue, on which ops run, a side queue for copies beside them, and one for weights."""

    def pinned(self, nbytes: int) -> Tensor:
        """Host memory (uint8) that copies read and write while the host goes on."""
        ...

    def mark(self) -> QueueEvent:
        """Mark this point of the main queue."""
        ...

    def send(self, copies: Copies, after: QueueEvent | None) -> QueueEvent:
        """Queue copies on the side, behind `after` (None: all that the main queue holds by now); the main queue goes on
        when they are done. Returns their end."""
        ...

    def ahead(self, copies: Copies) -> QueueEvent:
        """Queue copies on a third queue, behind all that the main queue holds by now, which does not wait for them.
        Returns their end."""
        ...

    def wait_for(self, mark: QueueEvent) -> None:
        """What is queued on the main queue from here on runs behind `mark`; the host does not wait."""
        ...

    def place(self, copies: Copies) -> None:
        """Queue copies within the device on the main queue."""
        ...

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """Queue copies to the host on the main queue; they are waited for, once for all, when the result is called."""
        ...

    def capture(self, fn: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """(what queues the work of `fn` again on the same addresses, its result). `fn` is also run once before."""
        ...

    def memory(self) -> tuple[int, int]:
        """Bytes (free, total)."""
        ...

    def peak(self, step: Callable[[], object]) -> int:
        """Bytes that `step` needed beyond what was in use."""
        ...


def take_drawn(ids: Tensor, drawn: Tensor) -> None:
    """Queue: each -1 - i in `ids` int32 [n] becomes `drawn[i]` (int32), or 0 where nothing could be drawn (-1)."""
    ids.copy_(torch.where(ids < 0, drawn.index_select(0, (-1 - ids).clamp_(min=0)), ids).clamp_(min=0))
