"""Layers that come in turn while those before them run, from wherever they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.model.offload.offloaded import pages
from quire.model.offload.stream import Segment, Stream, StreamCounts, turns
from quire.ops.arrays import Host
from quire.ops.backend import Ops

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
