"""Memory that ranks on one host share, and the collectives over it (csrc/collectives.cpp)."""

from __future__ import annotations

import mmap
import os
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import F32, I32
from quire.core.errors import ConfigError
from quire.core.machine import memory_file
from quire.ops.arrays import Array, Host, dtype_of
from quire.ops.backend import Ops
from quire.ops.native import best_ops, check, require_native

RANKS = 64
HEADER = 64 * (2 * RANKS + 4)
"""Bytes of the header: a line of cache for each word of csrc/comm.h."""
MESSAGE = 1 << 20
"""Bytes of the longest message."""
SLOT = 1 << 20
"""Bytes of a slot: longer parts are exchanged in pieces."""
PIECE = 256 << 10
"""Bytes of a piece of what one rank sends to another, and of the longest answer."""
RING = 128 + 16 * (64 + PIECE)
"""Bytes of the pieces that lie between two ranks, in one direction; pages that nobody has written take no memory."""
KNOWN_PARTS = 256
"""Sizes of parts that are kept ready: those of a model's matrices are few, those of a step's rows are not."""
SPINS = 20_000
"""Looks before a rank sleeps, some 0.3 ms, where each has a core of its own; waking takes 50 us."""


def shared_memory(nbytes: int) -> int:
    """A file in memory of so many bytes, zeros, without a name; the descriptor is the caller's."""
    file = memory_file()
    try:
        os.ftruncate(file, nbytes)
    except OSError as error:
        os.close(file)
        raise ConfigError(f"the system does not grant {nbytes:,} bytes that ranks share: {error.strerror}") from None
    return file


def comm_bytes(world: int) -> int:
    """Memory that `world` ranks share for their collectives."""
    return HEADER + MESSAGE + 2 * world * SLOT + world * world * RING


class SharedComm:
    """One rank's side (`Comm`). `file`: a descriptor of `comm_bytes(world)` zeros that all ranks map.

    `crowded`: there are more threads than cores, so who waits sleeps. `patience_s`: how long a rank waits for another
    before it ends the group, 0: for ever. Collectives raise `ValueError` once a rank has left, or one of `within`, a
    group that has all ranks of this one.
    """

    recordable = True

    def __init__(
        self,
        file: int,
        rank: int,
        world: int,
        crowded: bool = False,
        patience_s: float = 0.0,
        within: SharedComm | None = None,
    ) -> None:
        self.rank, self.world = rank, world
        self._map = mmap.mmap(file, comm_bytes(world))
        self._memory = np.frombuffer(self._map, np.uint8)
        base = self._memory.ctypes.data
        slots = base + HEADER + MESSAGE
        self._within = within
        self._left: int = base + HEADER - 64 if within is None else within._left
        places = [base, base + HEADER, slots, slots + 2 * world * SLOT, self._left]
        spins, patience = 0 if crowded else SPINS, round(1000 * patience_s)
        self._state = np.array([*places, rank, world, SLOT, MESSAGE, spins, patience, 0, 0, 0], np.int64)
        self._at = int(self._state.ctypes.data)
        self._starts: dict[tuple[int, ...], NDArray[np.int64]] = {}
        self._heard, self._said = np.empty(MESSAGE, np.uint8), np.empty(PIECE, np.uint8)
        self._size = np.zeros(1, np.int64)
        self._where = int(self._heard.ctypes.data), int(self._size.ctypes.data)
        self._saying = int(self._said.ctypes.data)
        self._module, self._ids = require_native(), best_ops()

    def all_reduce(self, ops: Ops, x: Array) -> Array:
        """Implement `Comm`."""
        own = check(ops.host(x), "all_reduce x", F32, -1, -1)
        self._run(ops, "all_reduce", own, own.size)
        return x

    def reduce_scatter(self, ops: Ops, x: Array, rows: tuple[int, ...]) -> Array:
        """Implement `Comm`."""
        own = check(ops.host(x), "reduce_scatter x", F32, sum(rows), -1)
        out: Array = ops.empty(rows[self.rank], own.shape[1])
        self._run(ops, "reduce_scatter", ops.host(out), own, self._starts_of(rows, own.shape[1]))
        return out

    def all_gather(self, ops: Ops, x: Array, rows: tuple[int, ...]) -> Array:
        """Implement `Comm`."""
        own = check(ops.host(x), "all_gather x", dtype_of(x), rows[self.rank], -1)
        out: Array = ops.empty(sum(rows), own.shape[1], own.dtype)
        self._run(ops, "gather_columns", ops.host(out), own, self._starts_of(rows, _words(own)), 1)
        return out

    def gather_columns(self, ops: Ops, x: Array, widths: tuple[int, ...]) -> Array:
        """Implement `Comm`."""
        own = check(ops.host(x), "gather_columns x", F32, -1, widths[self.rank])
        out: Array = ops.empty(len(own), sum(widths))
        self._run(ops, "gather_columns", ops.host(out), own, self._starts_of(widths, 1), len(own))
        return out

    def all_to_all(self, ops: Ops, x: Array, sends: Array, most: int) -> tuple[Array, Array]:
        """Implement `Comm`."""
        own = check(ops.host(x), "all_to_all x", dtype_of(x), -1, -1)
        to = check(ops.host(sends), "all_to_all sends", I32, self.world)
        out, received = ops.empty(most, own.shape[1], own.dtype), ops.empty(1, self.world, I32)[0]
        self._run(ops, "all_to_all", ops.host(out), ops.host(received), own, to, len(own), most, 4 * _words(own))
        return out, received

    def broadcast(self, ops: Ops, x: Array, root: int) -> Array:
        """Implement `Comm`."""
        own = _flat(ops.host(x), "broadcast x")
        if own.size:
            self._run(ops, "broadcast", own, own.nbytes, self._known(root, "broadcast"))
        return x

    def send(self, ops: Ops, x: Array, to: int) -> None:
        """Implement `Comm`; 16 pieces of `PIECE` bytes have room between two ranks."""
        own = _flat(ops.host(x), "send x")
        self._run(ops, "send", own, own.nbytes, self._other(to, "send"))

    def recv(self, ops: Ops, out: Array, source: int) -> Array:
        """Implement `Comm`; `ValueError` when the other has sent another number of bytes."""
        own = _flat(ops.host(out), "recv out")
        self._run(ops, "recv", own, own.nbytes, self._other(source, "recv"))
        return out

    @property
    def waited_s(self) -> float:
        """Seconds spent in `recv` until something was there."""
        return 1e-9 * float(self._state[-1])

    def _starts_of(self, parts: tuple[int, ...], each: int) -> NDArray[np.int64]:
        """Where each rank's part begins, and where the last one ends."""
        if len(parts) != self.world or min(parts) < 0:
            raise ValueError(f"{parts} are not the parts of {self.world} ranks")
        starts = tuple(each * start for start in accumulate(parts, initial=0))
        if starts not in self._starts:
            if len(self._starts) >= KNOWN_PARTS:
                self._starts.clear()
            self._starts[starts] = np.array(starts, np.int64)
        return self._starts[starts]

    def _known(self, rank: int, what: str) -> int:
        if not 0 <= rank < self.world:
            raise ValueError(f"{what}: there is no rank {rank} of {self.world}")
        return rank

    def _other(self, rank: int, what: str) -> int:
        if rank == self.rank:
            raise ValueError(f"{what}: rank {rank} is this one")
        return self._known(rank, what)

    def _run(self, ops: Ops, name: str, *args: int | Host) -> None:
        """Now, or as a part of the recording that is open."""
        ops.native(name, self._at, *args)

    def tell(self, message: bytes) -> None:
        """Rank 0 says something to all others; it waits until they have heard what was before."""
        for at in range(0, max(1, len(message)), MESSAGE - 1):
            piece = message[at : at + MESSAGE - 1]
            more = bytes([at + len(piece) < len(message)])
            self._module.call(self._ids["tell"], (self._at, _address(data := more + piece), len(data)))

    def hear(self, milliseconds: int) -> bytes | None:
        """What rank 0 says next, or None when it says nothing for so long."""
        pieces: list[bytes] = []
        while True:
            self._module.call(self._ids["hear"], (self._at, *self._where, milliseconds))
            size = int(self._size[0])
            if size < 0 and not pieces:
                return None
            if size >= 0:
                pieces.append(self._heard[1:size].tobytes())
                if not self._heard[0]:
                    return b"".join(pieces)

    def say(self, message: bytes) -> None:
        """Send to rank 0, which need not listen at once: 16 messages of at most `PIECE` bytes have room."""
        if len(message) > PIECE:
            raise ValueError(f"say: {len(message):,} bytes are more than the {PIECE:,} there is room for")
        self._said.data[: len(message)] = message
        self._module.call(self._ids["say"], (self._at, self._saying, len(message)))

    def listen(self, rank: int, milliseconds: int = 0) -> bytes | None:
        """What `rank` says next to rank 0, or None when it has said nothing for so long."""
        self._module.call(self._ids["listen"], (self._at, self._known(rank, "listen"), *self._where, milliseconds))
        size = int(self._size[0])
        return None if size < 0 else self._heard[:size].tobytes()

    def leave(self) -> None:
        """A rank has ended: whoever waits for it need not."""
        self._module.call(self._ids["leave"], (self._at,))


def _words(x: Host) -> int:
    """How many times 4 bytes a row of x [T, d] has."""
    if x.shape[1] * x.itemsize % 4:
        raise ValueError(f"rows of {x.shape[1]} {x.dtype} are not whole numbers of 4 bytes")
    return int(x.shape[1]) * x.itemsize // 4


def _flat(x: Host, what: str) -> Host:
    if not x.flags.c_contiguous:
        raise ValueError(f"{what}: need a contiguous array")
    return x


def _address(data: bytes) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)
