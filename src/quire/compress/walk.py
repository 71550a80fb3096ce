"""Calibration text on its way through a model, one layer at a time: what methods see of a layer's inputs.

Memory is that of one layer, of what is counted of its inputs, and of the stream, which may lie in a file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from quire.compress.net import Net
from quire.learn.loop import mapped

CHUNK = 8
"""Rows of text that go through a layer together."""
Seen = Callable[[str, int | None, Tensor], None]
"""(role, expert, input rows [T, k] f32)."""


class Stream:
    """The stream of `rows` of tokens, all of one length, before a layer: x and what is to be added to it.

    `folder`: where it lies in files that the system may page out; None: in memory.
    """

    def __init__(self, net: Net, rows: Sequence[Sequence[int]], folder: Path | None = None) -> None:
        self._net, self._chunks = net, [rows[at : at + CHUNK] for at in range(0, len(rows), CHUNK)]
        self._folder = folder
        shape = (len(rows), len(rows[0]), net.spec.hidden)
        self._x, self._delta = self._room(shape), self._room(shape)
        self.layer = 0
        with torch.no_grad():
            first = net.before_layers()
            for at, chunk in self._parts():
                self._x[at] = net.enter(torch.tensor(chunk), first)

    @property
    def parts(self) -> int:
        """In how many parts the text goes."""
        return len(self._chunks)

    def observe(self, layer: object, seen: Seen) -> None:
        """Show what the products of the next layer read; the stream stays before it. `layer`: its weights."""
        with torch.no_grad(), self._net.observe(lambda role, _, expert, x: seen(role, expert, x)):
            for at, _ in self._parts():
                self._run(at, layer)

    def advance(self, layer: object) -> None:
        """Go past the next layer."""
        with torch.no_grad():
            for at, _ in self._parts():
                self._x[at], self._delta[at] = self._run(at, layer)
        self.layer += 1

    def chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """x and delta [rows, L, h] of each part of the text."""
        for at, _ in self._parts():
            yield self._x[at], self._delta[at]

    def _run(self, at: slice, layer: object) -> tuple[Tensor, Tensor]:
        delta = self._delta[at] if self.layer else None
        return self._net.run_layer(self.layer, self._x[at], delta, layer)  # type: ignore[arg-type]

    def _parts(self) -> Iterator[tuple[slice, Sequence[Sequence[int]]]]:
        for i, chunk in enumerate(self._chunks):
            yield slice(i * CHUNK, i * CHUNK + len(chunk)), chunk

    def _room(self, shape: tuple[int, ...]) -> Tensor:
        if self._folder is None:
            return torch.zeros(shape)
        return mapped(self._folder / f"stream-{os.getpid()}", math.prod(shape)).view(shape)
