"""Stages that change the matrices of one layer after another, each with what calibration text shows of its inputs.

A layer sees the text as the changed layers before it make it, and so makes up for a part of what they cost (as GPTQ has
it, Frantar et al. 2023). What a layer became is kept before the next begins: a run that is killed goes on there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from quire.compress.kept import from_tensors, to_tensors
from quire.compress.matrices import Matrix, matrices
from quire.compress.net import Net
from quire.compress.resume import Work
from quire.compress.stages import Stage
from quire.compress.stats import Inputs
from quire.compress.walk import Stream
from quire.core.errors import ConfigError, ModelError
from quire.ops.weights import Weight

Key = tuple[str, int | None]
"""The role whose input rows are looked at, and the expert."""


@dataclass(frozen=True)
class Change:
    """What a stage does to a matrix w [n, k] f32: `of(w, what was seen of its inputs, its name)`.

    `wants`: parts of `Inputs`; none = no text is read. `in_turn`: matrices that read what changed ones of the same
    layer make see that, at the price of another pass of the text for each.
    """

    of: Callable[[Tensor, Inputs | None, str], Weight]
    wants: tuple[str, ...] = ()
    in_turn: bool = True


def change_layers(
    net: Net,
    stage: tuple[int, Stage],
    change: Change,
    rows: Sequence[Sequence[int]],
    work: Work,
    tell: Callable[[str], None],
    spill: Path | None = None,
) -> None:
    """Change all layers of `net` and keep each matrix's new form in `work`, as unit "layer N" of the stage.

    `stage`: its number, and what it asks for. `rows`: calibration text. `spill`: a folder for the stream, None = memory. `tell(what is next)` after each layer.
    `ModelError` names the matrix that cannot be changed.
    """
    number, asked = stage
    stream = Stream(net, rows, spill) if change.wants else None
    for layer in range(net.spec.layers):
        found = [m for m in matrices(net, layer) if asked.covers(m.base)]
        name = f"layer {layer}"
        if work.done(number, name):
            for matrix, weight in of_unit(work, number, name, found):
                matrix.put(net, weight.dequantize())
        else:
            work.keep(number, name, *to_tensors(_changed(net, layer, found, change, stream)))
        if stream is not None:
            stream.advance(net.layer(layer))
        for matrix in found:
            matrix.forget(net)
        tell(f"layer {layer + 2} of {net.spec.layers}" if layer + 1 < net.spec.layers else "writing")


def of_unit(work: Work, number: int, name: str, wanted: Sequence[Matrix]) -> Iterator[tuple[Matrix, Weight]]:
    """What was kept of the matrices `wanted` in a unit."""
    kept = from_tensors(work.tensors(number, name), work.facts(number, name))
    return ((matrix, kept[matrix.base]) for matrix in wanted)


def _changed(net: Net, layer: int, found: Sequence[Matrix], change: Change, stream: Stream | None) -> dict[str, Weight]:
    """The new forms of a layer's matrices, whose numbers `net` has afterwards."""
    made: dict[str, Weight] = {}
    turns = [list(group) for _, group in groupby(found, key=lambda m: m.turn)] if change.in_turn else [list(found)]
    for turn in turns if stream is not None else [list(found)]:
        seen = observed(net, layer, turn, change.wants, stream)
        for matrix in turn:
            try:
                weight = change.of(matrix.of(net), seen.get((matrix.observed, matrix.place.expert)), matrix.base)
            except (ModelError, ConfigError) as error:
                raise type(error)(f"{matrix.base}: {error.message}") from None
            matrix.put(net, weight.dequantize())
            made[matrix.base] = weight
    return made


def observed(
    net: Net, layer: int, wanted: Sequence[Matrix], parts: Sequence[str], stream: Stream | None
) -> Mapping[Key, Inputs]:
    """What the calibration text shows of the inputs of matrices of `layer`, which the stream is before."""
    if stream is None:
        return {}
    seen = {(m.observed, m.place.expert): Inputs(m.of(net).shape[1], parts) for m in wanted}

    def see(role: str, expert: int | None, x: Tensor) -> None:
        if (role, expert) in seen:
            seen[role, expert].add(x)

    with torch.no_grad():
        stream.observe(net.layer(layer), see)
    return seen
