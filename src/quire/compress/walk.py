"""Calibration text on its way through a model, one layer at a time: what methods see of a layer's inputs.

Memory is that of one layer, of what is counted of its inputs, and of the stream, which may lie in a file.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from quire.compress.net import Net
from quire.model.net.decoder import Layer
from quire.training.loop import unnamed

TOKENS = 2048
"""That go through a layer together, or a row where that is longer: products are at full speed, and what a layer of
llama-1b makes between its matrices is 0.3 GiB."""
Seen = Callable[[str, int | None, Tensor], None]
"""(role, expert, input rows [T, k] f32)."""


class _Enough(Exception):
    """All that was wanted of a layer has been seen."""


class Stream:
    """The stream of `rows` of tokens, all of one length, before a layer.

    `folder`: where it lies in a file, of which a part is read at a time; None: in memory.
    """

    def __init__(self, net: Net, rows: Sequence[Sequence[int]], folder: Path | None = None) -> None:
        self._net = net
        count, length = len(rows), len(rows[0])
        step = max(1, TOKENS // length)
        self._parts = [slice(at, min(count, at + step)) for at in range(0, count, step)]
        shape = count, length, net.spec.hidden
        self._x = torch.zeros(shape) if folder is None else _Spilled(folder / "stream", shape)
        self.layer = 0
        with torch.no_grad():
            first = net.before_layers()
            for at in self._parts:
                self._x[at] = net.enter(torch.tensor(rows[at]), first)

    @property
    def parts(self) -> int:
        """In how many parts the text goes."""
        return len(self._parts)

    def observe(self, layer: Layer, seen: Seen, roles: Collection[str]) -> None:
        """Show what the products of the next layer read; the stream stays before it. `layer`: its weights.

        What comes behind the last of `roles` is not computed: of llama-1b's layer in four turns that leaves the
        products of 1.1 passes. Roles of experts are not known to be the last, as every expert has rows of its own.
        """
        missing = set(roles)

        def see(role: str, _: int | None, expert: int | None, x: Tensor) -> None:
            seen(role, expert, x)
            if expert is None:
                missing.discard(role)
            if not missing:
                raise _Enough

        with torch.no_grad(), self._net.observe(see):
            for at in self._parts:
                missing.update(roles)
                with suppress(_Enough):
                    self._run(at, layer)

    def advance(self, layer: Layer, passed: Callable[[Tensor, Tensor], None] | None = None) -> None:
        """Go past the next layer. `passed(before, after)`: what the stream [rows, L, h] of each part was and is."""
        with torch.no_grad():
            for at in self._parts:
                after = self._run(at, layer)
                if passed is not None:
                    passed(self._x[at], after)
                self._x[at] = after
        self.layer += 1

    def _run(self, at: slice, layer: Layer) -> Tensor:
        x = self._x[at]
        # What is to be added is added at once: x and delta would be twice as much to hold.
        delta = torch.zeros(1).expand_as(x) if self.layer else None
        x, delta = self._net.run_layer(self.layer, x, delta, layer)
        return x + delta


class _Spilled:
    """Rows [count, length, hidden] f32 in a file, read and written in slices of rows."""

    def __init__(self, path: Path, shape: tuple[int, ...]) -> None:
        self._shape, self._row = shape, 4 * math.prod(shape[1:])
        self._file = unnamed(path, shape[0] * self._row)
        weakref.finalize(self, os.close, self._file)

    def __getitem__(self, at: slice) -> Tensor:
        x = torch.empty(at.stop - at.start, *self._shape[1:])
        data, done = x.numpy().data.cast("B"), 0
        while done < len(data):
            done += os.preadv(self._file, [data[done:]], at.start * self._row + done)
        return x

    def __setitem__(self, at: slice, x: Tensor) -> None:
        data, done = x.contiguous().numpy().data.cast("B"), 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], at.start * self._row + done)
