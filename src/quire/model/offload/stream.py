"""The native readers of csrc/stream.cpp: layers in turn while those before them run, or experts as they are chosen."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from quire.model.offload.offloaded import pages
from quire.ops.arrays import Host, address
from quire.ops.backend import Ops
from quire.ops.descriptors import ReaderDescriptor

THREADS, PIECE = 4, 2 << 20
"""Requests in flight, and bytes of one."""


class StreamCounts(NamedTuple):
    """Counts so far: bytes read, nanoseconds that steps waited, experts needed, experts that were not in memory."""

    read: int
    waited: int
    needed: int
    missed: int


class Segment(NamedTuple):
    """A run of bytes of layer `part`: `bytes` from `offset` of the file `file` (a descriptor) on, to `at` of its
    slot."""

    part: int
    file: int
    offset: int
    bytes: int
    at: int


class Stream:
    """A native reader. It is closed, and what it `keeps` let go, when nobody holds it any more.

    `cached`: its file is read by way of the system's cache.
    """

    def __init__(self, ops: Ops, name: str, keeps: Sequence[Any], cached: bool, *args: int) -> None:
        self._ops, self._beside, made = ops, ops.beside(), np.zeros(1, np.int64)
        reader = ReaderDescriptor(threads=THREADS, piece=PIECE, cached=int(cached))
        self._beside.native(name, made, reader, *args)
        self._at = int(made[0])
        self.close = weakref.finalize(self, _close, self._beside, self._at, keeps)

    def call(self, name: str, *args: int | Host) -> None:
        """Run an op of it, or record it."""
        self._ops.native(name, self._at, *args)

    def counts(self) -> StreamCounts:
        """What the stream did so far."""
        found = np.zeros(4, np.int64)
        self._beside.native("stream_counts", self._at, found)
        return StreamCounts(*found.tolist())


def turns(
    ops: Ops, slots: Sequence[Host], segments: Sequence[Segment], layers: int, cached: bool, *keeps: Any
) -> Stream:
    """A reader of `layers` layers, of which number j lies in slot j % len(slots)."""
    where, rows = np.array([address(s) for s in slots], np.int64), np.array(segments, np.int64)
    at = int(where.ctypes.data), len(slots), int(rows.ctypes.data), len(rows)
    return Stream(ops, "stream_layers", (*slots, *keeps), cached, *at, layers)


def _close(ops: Ops, at: int, keeps: Sequence[Any]) -> None:
    ops.native("stream_close", at)
    for kept in keeps:
        with suppress(AttributeError, OSError):
            kept.close()


SLOTS = 2
"""Layers that come: one is computed while the next is read."""


class Streamed:
    """`LayerSource` of layers that come, `nbytes` in all, while the others stay."""

    recordable = True

    def __init__(
        self, ops: Ops, sizes: Mapping[int, int], segments: Sequence[Segment], cached: bool, *keeps: Any
    ) -> None:
        """`sizes`: bytes by layer, in order; `segments` count their parts in that order. `keeps` are closed at the end.

        Returns when the first layers are there.
        """
        self.sizes, self.segments, self.cached = tuple(sizes.values()), tuple(segments), cached
        self.keeps = keeps
        self.nbytes = sum(self.sizes)
        self._turn = {layer: turn for turn, layer in enumerate(sizes)}
        self._slots = [pages(max(self.sizes)) for _ in range(min(SLOTS, len(sizes)))]
        self._stream: Stream = turns(ops, self._slots, segments, len(sizes), cached, *keeps)
        for turn in range(len(self._slots)):  # so that their memory counts as taken from here on
            self._stream.call("stream_wait", turn)

    def slot_of(self, layer: int) -> Host:
        """Where the numbers of `layer` lie when it runs."""
        return self._slots[self._turn[layer] % len(self._slots)]

    def before(self, layer: int) -> None:
        """Wait for the layer, unless it stays in memory."""
        if layer in self._turn:
            self._stream.call("stream_wait", self._turn[layer])

    def after(self, layer: int) -> None:
        """Note that a layer's slot is free for the next that comes there."""
        if layer in self._turn:
            self._stream.call("stream_done", self._turn[layer])

    def counts(self) -> StreamCounts:
        """What was read so far, and how long steps waited."""
        return self._stream.counts()
