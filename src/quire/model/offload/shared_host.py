"""Replicas on one host or on several keep one copy of their layers' matrices together (`--fully-shard`).

ZeRO-3 (Rajbhandari et al. 2020) leaves each of N ranks 1 / N of the weights and gathers a layer before it runs. Ranks
on one host need not gather: their shares lie in memory that all of them map. Who comes first writes it, and the others
hold what they packed themselves against it. With `--nnodes` each host has a share of every layer in memory, and a
layer's other shares are gathered while the layers before it run.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from quire.core.errors import ModelError
from quire.model.load.placement import PlacedLayers
from quire.model.net.decoder import Layer, Resident
from quire.model.offload.offloaded import PAGE, OffloadedLayer, pages, returned
from quire.model.offload.stream import Segment, Streamed
from quire.ops.arrays import Host
from quire.ops.backend import Ops
from quire.parallel.weight_shares import HEADER, length


class FileDescriptor(Protocol):
    """What native readers ask for bytes. `lost`: nobody answers any more."""

    lost: bool

    def fileno(self) -> int:
        """The descriptor."""

    def leave(self) -> None:
        """Let who waits for bytes go."""

    def close(self) -> None:
        """Nobody uses it any more."""


@dataclass(frozen=True)
class Shards:
    """Memory for weights: `file`, a descriptor that all replicas of this host have; and, where there are others, the
    shares of `hosts`, of which this is number `node`: there, None."""

    file: int
    node: int = 0
    hosts: tuple[FileDescriptor | None, ...] = (None,)

    @property
    def lost(self) -> bool:
        """Whether any of the hosts is gone."""
        return any(host is not None and host.lost for host in self.hosts)


class SharedFile:
    """Memory without a name. Whoever finds it not whole locks it and `writes`; the others wait.

    The system takes the lock from a process that ends, and who waited begins anew. It begins with a page for its head.
    """

    def __init__(self, file: int) -> None:
        self.file = file
        fcntl.lockf(file, fcntl.LOCK_EX)
        self._whole = length(file)
        self.writes = self._whole == 0
        if not self.writes:
            fcntl.lockf(file, fcntl.LOCK_UN)

    def room(self, index: int, end: int) -> None:
        """Layer `index` is to end at `end`. `ModelError` where the replica that wrote had none there."""
        if self.writes:
            os.ftruncate(self.file, end)
        elif end > self._whole:
            raise differs(index)

    def finish(self, layers: int, end: int) -> None:
        """Let the other replicas read now."""
        if self.writes:
            os.pwrite(self.file, HEADER.pack(end), 0)
            fcntl.lockf(self.file, fcntl.LOCK_UN)
        elif end != self._whole:
            raise differs(layers)


class SharedKeeper:
    """Layers in a file that all replicas map."""

    def __init__(self, ops: Ops, file: int) -> None:
        self._ops, self._shared, self._end = ops, SharedFile(file), PAGE
        self._maps: list[mmap.mmap] = []  # a process that closes one would lose its lock

    def take(self, index: int, layer: Layer) -> Any:
        """The layer with its numbers in the shared memory."""
        leaving, begin = OffloadedLayer(layer, self._ops), self._end
        self._end += leaving.size
        if not leaving.size:
            return layer
        self._shared.room(index, self._end)
        if self._shared.writes:
            leaving.write(self._map(begin, leaving.size, mmap.PROT_READ | mmap.PROT_WRITE))
        data = self._map(begin, leaving.size, mmap.PROT_READ)
        if not self._shared.writes and not leaving.equals(data):
            raise differs(index)
        return returned(leaving.skeleton, data, self._ops)

    def finish(self, layers: Sequence[Any], outer: int) -> PlacedLayers:
        """The layers, as the file has them."""
        self._shared.finish(len(layers), self._end)
        return PlacedLayers(tuple(layers), Resident())

    def _map(self, begin: int, size: int, rights: int) -> Host:
        area = mmap.mmap(self._shared.file, size, flags=mmap.MAP_SHARED, prot=rights, offset=begin)
        self._maps.append(area)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            area.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(area, np.uint8)


def differs(index: int) -> ModelError:
    """Layer `index` is another one."""
    return ModelError(
        f"--fully-shard: layer {index} is not what another replica made of the same files: they changed since it "
        "started; start the server again"
    )


class GatheredKeeper:
    """Every replica packs all layers, and of each the first of its host writes that host's pages to the file."""

    def __init__(self, ops: Ops, shards: Shards) -> None:
        self._ops, self._shards, self._shared = ops, shards, SharedFile(shards.file)
        self._ends = [PAGE] * len(shards.hosts)
        self._sizes: dict[int, int] = {}
        self._segments: list[Segment] = []
        self._stage = pages(PAGE)

    def take(self, index: int, layer: Layer) -> Any:
        """The layer, without the numbers that come."""
        leaving, count = OffloadedLayer(layer, self._ops), len(self._shards.hosts)
        if not leaving.size:
            return layer
        if len(self._stage) < leaving.size:
            self._stage = pages(leaving.size)
        self._stage[: leaving.size] = 0
        leaving.write(self._stage[: leaving.size])
        cuts = [leaving.size // PAGE * host // count * PAGE for host in range(count + 1)]
        for host, source in enumerate(self._shards.hosts):
            begin, end = cuts[host], cuts[host + 1]
            if begin < end:
                file = self._shards.file if source is None else source.fileno()
                self._segments.append(Segment(len(self._sizes), file, self._ends[host], end - begin, begin))
            if host == self._shards.node:
                self._keep(index, self._stage[begin:end], self._ends[host])
            self._ends[host] += end - begin
        self._sizes[index] = leaving.size
        return leaving.skeleton

    def finish(self, layers: Sequence[Any], outer: int) -> PlacedLayers:
        """The layers in slots that they come to; returns when the other hosts have theirs."""
        self._shared.finish(len(layers), self._ends[self._shards.node])
        if not self._sizes:
            return PlacedLayers(tuple(layers), Resident())
        self._stage = pages(PAGE)
        far = [source for source in self._shards.hosts if source is not None]
        source = Streamed(self._ops, self._sizes, self._segments, False, *far)
        # Before the readers end, which wait for what they asked for: a host may be silent.
        weakref.finalize(source, _leave, far)
        found = list(layers)
        for i in self._sizes:
            found[i] = returned(found[i], source.slot_of(i), self._ops)
        return PlacedLayers(tuple(found), source)

    def _keep(self, index: int, share: Host, begin: int) -> None:
        """Write this host's share of a layer, or hold it against what is there."""
        self._shared.room(index, begin + len(share))
        view, at = share.data, 0
        while self._shared.writes and at < len(share):
            at += os.pwrite(self._shards.file, view[at:], begin + at)
        if not self._shared.writes and os.pread(self._shards.file, len(share), begin) != view:
            raise differs(index)


def _leave(sources: Sequence[FileDescriptor]) -> None:
    for source in sources:
        source.leave()
