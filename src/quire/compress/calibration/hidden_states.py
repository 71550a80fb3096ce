"""Hidden states of calibration text, one layer at a time: what methods observe of a layer's inputs.

Memory is that of one layer, of what is counted of its inputs, and of the hidden states, which may lie in a file.
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

from quire.compress.checkpoint.net import Net
from quire.core.progress import stage
from quire.model.net.decoder import Layer
from quire.training.loop import unnamed

TOKENS = 2048
"""That go through a layer together, or a row where that is longer: products are at full speed, and what a layer of
llama-1b makes between its matrices is 0.3 GiB."""
InputCallback = Callable[[str, int | None, Tensor], None]
"""(role, expert, input rows [T, k] f32)."""


class _AllObserved(Exception):
    """All that was wanted of a layer has been seen."""


class HiddenStates:
    """The hidden states of `rows` of tokens, all of one length, before a layer.

    `folder`: where they lie in a file, of which a part is read at a time; None: in memory.
    """

    def __init__(self, net: Net, rows: Sequence[Sequence[int]], folder: Path | None = None) -> None:
        self._net = net
        count, length = len(rows), len(rows[0])
        step = max(1, TOKENS // length)
        self._parts = [slice(at, min(count, at + step)) for at in range(0, count, step)]
        shape = count, length, net.spec.hidden
        self._x = torch.zeros(shape) if folder is None else _FileBackedRows(folder / "stream", shape)
        self.layer = 0
        with torch.no_grad(), stage("calibration text: embeddings", count) as done:
            first = net.before_layers()
            for at in self._parts:
                done.update(at.stop)
                self._x[at] = net.enter(torch.tensor(rows[at]), first)

    @property
    def parts(self) -> int:
        """The number of parts in which the text runs through a layer."""
        return len(self._parts)

    def observe(self, layer: Layer, seen: InputCallback, roles: Collection[str]) -> None:
        """Call `seen` with what the products of the next layer read, without advancing. `layer`: its weights.

        What comes behind the last of `roles` is not computed: of llama-1b's layer in four turns that leaves the
        products of 1.1 passes. Roles of experts are not known to be the last, as every expert has rows of its own.
        """
        missing = set(roles)

        def see(role: str, _: int | None, expert: int | None, x: Tensor) -> None:
            seen(role, expert, x)
            if expert is None:
                missing.discard(role)
            if not missing:
                raise _AllObserved

        with torch.no_grad(), self._net.observe(see), stage("calibration text: observing", len(self._parts)) as done:
            for at in self._parts:
                done.advance()
                missing.update(roles)
                with suppress(_AllObserved):
                    self._run(at, layer)

    def advance(self, layer: Layer, passed: Callable[[Tensor, Tensor], None] | None = None) -> None:
        """Replace the hidden states by those after the next layer.

        `passed(before, after)`: called with the states [rows, L, h] of each part.
        """
        with torch.no_grad(), stage("calibration text: next layer", len(self._parts)) as done:
            for at in self._parts:
                done.advance()
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


class _FileBackedRows:
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
