"""Replicas on one host keep one copy of their layers' matrices together (`--fully-shard`).

ZeRO-3 (Rajbhandari et al. 2020) leaves each of N ranks 1 / N of the weights and gathers a layer before it runs. Ranks
on one host need not gather: their shares lie in memory that all of them map. Who comes first writes it, and the others
hold what they packed themselves against it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.core.errors import ModelError
from quire.model.load.keeping import Kept
from quire.model.net.decoder import Layer
from quire.model.net.source import Resident
from quire.model.offload.away import PAGE, Leaving, returned

HEADER = struct.Struct("<q")
"""Bytes of the file once it is whole, 0 before."""


class SharedKeeper:
    """Layers in `file`, a descriptor of memory without a name that all replicas have.

    Whoever finds it not whole locks it and writes; the others wait. The system takes the lock from a process that ends,
    and who waited begins anew.
    """

    def __init__(self, file: int) -> None:
        self._file, self._end = file, PAGE
        self._maps: list[mmap.mmap] = []  # a process that closes one would lose its lock
        fcntl.lockf(file, fcntl.LOCK_EX)
        head = os.pread(file, HEADER.size, 0).ljust(HEADER.size, b"\0")
        (self._whole,) = HEADER.unpack(head)
        self.writes = self._whole == 0
        if not self.writes:
            fcntl.lockf(file, fcntl.LOCK_UN)

    def take(self, index: int, layer: Layer) -> Any:
        """The layer with its numbers in the shared memory."""
        leaving, begin = Leaving(layer), self._end
        self._end += leaving.size
        if not leaving.size:
            return layer
        if self.writes:
            os.ftruncate(self._file, self._end)
            leaving.write(self._map(begin, leaving.size, mmap.PROT_READ | mmap.PROT_WRITE))
        elif self._end > self._whole:
            raise self._differs(index)
        data = self._map(begin, leaving.size, mmap.PROT_READ)
        if not self.writes and not leaving.equals(data):
            raise self._differs(index)
        return returned(leaving.skeleton, data)

    def finish(self, layers: Sequence[Any], outer: int) -> Kept:
        """The others may read now."""
        if self.writes:
            os.pwrite(self._file, HEADER.pack(self._end), 0)
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        elif self._end != self._whole:
            raise self._differs(len(layers))
        return Kept(tuple(layers), Resident())

    def _map(self, begin: int, size: int, rights: int) -> Tensor:
        area = mmap.mmap(self._file, size, flags=mmap.MAP_SHARED, prot=rights, offset=begin)
        self._maps.append(area)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            area.madvise(mmap.MADV_HUGEPAGE)
        with warnings.catch_warnings():  # that it cannot be written is meant
            warnings.simplefilter("ignore", UserWarning)
            return torch.frombuffer(area, dtype=torch.uint8)

    def _differs(self, index: int) -> ModelError:
        return ModelError(
            f"--fully-shard: layer {index} is not what another replica made of the same files: they changed since it "
            "started; start the server again"
        )
