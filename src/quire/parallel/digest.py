"""A cheap digest of what each rank computes a step on, so that ranks that differ are found and not believed."""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from quire.core.errors import EngineFailure

WORD = struct.Struct("<QI")
"""Which step it is, and the CRC-32 of its sizes and arrays."""


class Mail(Protocol):
    """What other ranks say to rank 0, in order: over shared memory (`SharedComm`) or between hosts (`Hub`, `Spoke`)."""

    rank: int
    world: int


class DigestSender(Mail, Protocol):
    """A rank that is not the first."""

    def say(self, message: bytes) -> None:
        """Send to rank 0."""
        ...


class DigestReceiver(Mail, Protocol):
    """Rank 0."""

    def listen(self, rank: int, milliseconds: int = 0) -> bytes | None:
        """What `rank` says next, or None when it has said nothing for so long."""
        ...


def digest(step: int, sizes: Sequence[int], arrays: bytes) -> bytes:
    """12 bytes that two ranks have in common where they compute the same step on the same numbers."""
    return WORD.pack(step, zlib.crc32(arrays, zlib.crc32(struct.pack(f"<{len(sizes)}q", *sizes))))


class SentDigests:
    """A rank's digests, on their way to rank 0."""

    def __init__(self, mail: DigestSender) -> None:
        self._mail, self._step = mail, 0

    def step(self, sizes: Sequence[int], arrays: bytes) -> None:
        """Note that this rank begins a step of these sizes on these arrays."""
        self._step += 1
        self._mail.say(digest(self._step, sizes, arrays))


class ReceivedDigests:
    """Rank 0's digests, and what the others say of theirs."""

    def __init__(self, mail: DigestReceiver, patience_ms: int = 30_000) -> None:
        self._mail, self._patience = mail, patience_ms
        self._step = 0
        self._due: deque[bytes] = deque()

    def step(self, sizes: Sequence[int], arrays: bytes) -> None:
        """All ranks are to begin a step of these sizes on these arrays."""
        self._step += 1
        self._due.append(digest(self._step, sizes, arrays))

    def settle(self, behind: int = 0) -> None:
        """Compare what is due, but for the last `behind` steps, which ranks may still be on their way to.

        `EngineFailure` names the step and the ranks that differ, or that say nothing for so long.
        """
        while len(self._due) > behind:
            own = self._due.popleft()
            said = {rank: self._mail.listen(rank, self._patience) for rank in range(1, self._mail.world)}
            silent = [rank for rank, word in said.items() if word is None]
            if silent:
                raise EngineFailure(f"step {WORD.unpack(own)[0]}: ranks {silent} have not come in time")
            differ = [rank for rank, word in said.items() if word != own]
            if differ:
                raise EngineFailure(f"step {WORD.unpack(own)[0]}: ranks {differ} differ from rank 0")
