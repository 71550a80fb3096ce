"""Replicas on several hosts keep one copy of their layers together (`--fully-shard` with `--nnodes`).

ZeRO-3 (Rajbhandari et al. 2020): each host has a share of every layer in memory, and a layer's other shares are
gathered while the layers before it run.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

from quire.model.load.placement import PlacedLayers
from quire.model.net.decoder import Layer, Resident
from quire.model.offload.offloaded import PAGE, OffloadedLayer, pages, returned
from quire.model.offload.shared_host import FileDescriptor, Shards, SharedFile, differs
from quire.model.offload.stream import Segment
from quire.model.offload.streamed import Streamed
from quire.ops.arrays import Host
from quire.ops.backend import Ops


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
