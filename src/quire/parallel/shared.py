"""Memory that ranks on one host share, and the collectives over it (csrc/comm.cpp)."""

from __future__ import annotations

import mmap
import os
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.errors import ConfigError
from quire.core.machine import memory_file
from quire.ops.backend import Ops
from quire.ops.cpu import check
from quire.ops.native import best_ops, require_native

RANKS = 64
HEADER = 64 * (2 * RANKS + 4)
"""Bytes of the header: a line of cache for each word of csrc/comm.cpp."""
MESSAGE = 1 << 20
"""Bytes of the longest message."""
SLOT = 1 << 20
"""Bytes of a slot: longer parts are exchanged in pieces."""
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
    return HEADER + MESSAGE + 2 * world * SLOT


class SharedComm:
    """One rank's side (`Comm`). `file`: a descriptor of `comm_bytes(world)` zeros that all ranks map.

    `crowded`: there are more threads than cores, so who waits sleeps. Collectives raise `ValueError` once a rank has
    left.
    """

    def __init__(self, file: int, rank: int, world: int, crowded: bool = False) -> None:
        self.rank, self.world = rank, world
        self._map = mmap.mmap(file, comm_bytes(world))
        self._memory = np.frombuffer(self._map, np.uint8)
        base = self._memory.ctypes.data
        spins = 0 if crowded else SPINS
        places = [base, base + HEADER, base + HEADER + MESSAGE]
        self._state = np.array([*places, rank, world, SLOT, MESSAGE, spins, 0, 0], np.int64)
        self._at = int(self._state.ctypes.data)
        self._starts: dict[tuple[int, ...], NDArray[np.int64]] = {}
        self._heard, self._size = np.empty(MESSAGE, np.uint8), np.zeros(1, np.int64)
        self._module, self._ids = require_native(), best_ops()

    def all_reduce(self, ops: Ops, x: Tensor) -> Tensor:
        """As `Comm` says."""
        self._run(ops, "all_reduce", self._at, check(x, "all_reduce x", torch.float32, -1, -1).data_ptr(), x.numel())
        return x

    def gather_columns(self, ops: Ops, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        """As `Comm` says."""
        rows, total = len(check(x, "gather_columns x", torch.float32, -1, widths[self.rank])), sum(widths)
        if widths not in self._starts:
            self._starts[widths] = np.array([0, *accumulate(widths)], np.int64)
        out = torch.empty(rows, total) if ops.cpu is None else ops.cpu.arena.empty(rows, total)
        self._run(ops, "gather_columns", self._at, out.data_ptr(), x.data_ptr(), self._starts[widths].ctypes.data, rows)
        return out

    def _run(self, ops: Ops, name: str, *args: int) -> None:
        """Now, or as a part of the recording that is open."""
        if ops.cpu is None:
            self._module.call(self._ids[name], args)
        else:
            ops.cpu.call(name, *args)

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
            where = self._heard.ctypes.data, self._size.ctypes.data
            self._module.call(self._ids["hear"], (self._at, *where, milliseconds))
            size = int(self._size[0])
            if size < 0 and not pieces:
                return None
            if size >= 0:
                pieces.append(self._heard[1:size].tobytes())
                if not self._heard[0]:
                    return b"".join(pieces)

    def leave(self) -> None:
        """A rank has ended: whoever waits for it need not."""
        self._module.call(self._ids["leave"], (self._at,))


def _address(data: bytes) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)
