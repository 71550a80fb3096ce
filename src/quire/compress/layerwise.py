"""Stages that change the matrices of one layer after another, each with what calibration text shows of its inputs.

A layer sees the text as the changed layers before it make it, and so makes up for a part of what they cost (as GPTQ has
it, Frantar et al. 2023). What a layer became is kept before the next begins: a run that is killed goes on there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from quire.compress.kept import from_tensors, to_tensors
from quire.compress.matrices import Matrix, matrices
from quire.compress.net import Net
from quire.compress.quantize.kv_scales import CachePeaks
from quire.compress.resume import Work
from quire.compress.stages import Stage
from quire.compress.stats import Inputs
from quire.compress.walk import Stream
from quire.ops.weights import Weight

Key = tuple[str, int | None]
"""The role whose input rows are looked at, and the expert."""
SAMPLE = 512
"""Rows of inputs that are kept as they are, where a method wants some."""
TENSOR = "tensor "
"""Begins the name of what a unit keeps that is no matrix of the stage, by its name on disk."""


@dataclass
class Seen:
    """What calibration text shows of the rows that matrices read: sums, and a few rows [T, k] f32 themselves."""

    inputs: Inputs
    most: int = 0
    rows: list[Tensor] = field(default_factory=list)

    def add(self, x: Tensor) -> None:
        """Take in the rows of a part of the text; of each part evenly spaced ones are kept."""
        self.inputs.add(x)
        if self.most and len(x):
            self.rows.append(x[:: -(-len(x) // self.most)].clone())

    @property
    def sample(self) -> Tensor:
        """The rows that were kept."""
        return torch.cat(self.rows)


OfMatrix = Callable[[Tensor, Inputs | None], Weight]
Made = tuple[dict[str, Weight], dict[str, Tensor]]
"""New forms of matrices by their base names, and other tensors that changed with them, by their names on disk."""


@dataclass(frozen=True)
class Change:
    """What a stage does to the matrices of a layer: `of(net, layer, matrices, what was seen of their inputs)`.

    `wants`: parts of `Inputs`; none = no text is read. `sample`: whether rows themselves are wanted. `in_turn`: it is
    called for those matrices together that read the same, and later ones see what changed ones of the same layer make,
    at the price of another pass of the text for each. `cache`: whether the peaks of keys and values are wanted, which
    are kept as unit `peaks_of(layer)`.
    """

    of: Callable[[Net, int, Sequence[Matrix], Mapping[Key, Seen]], Made]
    wants: tuple[str, ...] = ()
    sample: bool = False
    in_turn: bool = True
    cache: bool = False

    @property
    def reads(self) -> bool:
        """Whether text is needed."""
        return bool(self.wants) or self.cache


def each(change: OfMatrix) -> Callable[[Net, int, Sequence[Matrix], Mapping[Key, Seen]], Made]:
    """A change of one matrix w [n, k] f32 after another: `change(w, what was seen of its inputs)`."""

    def of(net: Net, layer: int, wanted: Sequence[Matrix], seen: Mapping[Key, Seen]) -> Made:
        made = {}
        for matrix in wanted:
            with matrix.named():
                own = seen.get((matrix.observed, matrix.place.expert))
                made[matrix.base] = change(matrix.of(net), None if own is None else own.inputs)
        return made, {}

    return of


def together(
    change: Callable[[Iterator[Tensor], Inputs], Iterator[Weight]],
) -> Callable[[Net, int, Sequence[Matrix], Mapping[Key, Seen]], Made]:
    """A change of all matrices w [n, k] f32 that read the same, each when it is asked for.

    `change(these, what was seen of their inputs)`: that is of no others, and may be used up.
    """

    def of(net: Net, layer: int, wanted: Sequence[Matrix], seen: Mapping[Key, Seen]) -> Made:
        made, groups = dict[str, Weight](), dict[Key, list[Matrix]]()
        for matrix in wanted:
            groups.setdefault((matrix.observed, matrix.place.expert), []).append(matrix)
        for key, members in groups.items():
            weights = change((m.of(net) for m in members), seen[key].inputs)
            for matrix in members:
                with matrix.named():
                    made[matrix.base] = next(weights)
        return made, {}

    return of


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

    `stage`: its number, and what it asks for. `rows`: calibration text. `spill`: a folder for the stream, None =
    memory. `tell(what is next)` after each layer. `ModelError` names the matrix that cannot be changed.
    """
    number, asked = stage
    stream = Stream(net, rows, spill) if change.reads else None
    for layer in range(net.spec.layers):
        found = [m for m in matrices(net, layer) if asked.covers(m.base)]
        name = f"layer {layer}"
        if not work.done(number, name):
            made, tensors = _changed(net, layer, found, change, stream)
            others = {TENSOR + disk: Weight("f32", tensor) for disk, tensor in tensors.items()}
            work.keep(number, name, *to_tensors(made | others))
        made, tensors = of_unit(work, number, name)
        for disk, tensor in tensors.items():
            if disk in net.tensors:  # else it is of the layout
                net.set(disk, tensor)
        for matrix in found:
            matrix.put(net, made[matrix.base].dequantize())
        if stream is not None and (change.cache or layer + 1 < net.spec.layers):
            peaks = CachePeaks()
            with net.watch_cache(peaks.add):
                stream.advance(net.layer(layer))
            if change.cache and not work.done(number, peaks_of(layer)):
                work.keep(number, peaks_of(layer), {}, {"key": peaks.key, "value": peaks.value})
        for matrix in found:
            matrix.forget(net)
        for disk in tensors:
            net.tensors.pop(disk, None)
        tell(f"layer {layer + 2} of {net.spec.layers}" if layer + 1 < net.spec.layers else "writing")


def peaks_of(layer: int) -> str:
    """The unit that says how large a layer's keys and values became."""
    return f"cache {layer}"


def of_unit(work: Work, number: int, name: str) -> Made:
    """What was kept of a layer."""
    kept = from_tensors(work.tensors(number, name), work.facts(number, name))
    tensors = {key.removeprefix(TENSOR): weight.codes for key, weight in kept.items() if key.startswith(TENSOR)}
    return {key: weight for key, weight in kept.items() if not key.startswith(TENSOR)}, tensors


def _changed(net: Net, layer: int, found: Sequence[Matrix], change: Change, stream: Stream | None) -> Made:
    """The new forms of a layer's matrices, whose numbers `net` has afterwards."""
    made, tensors = dict[str, Weight](), dict[str, Tensor]()
    for matrix in found:
        matrix.check(net)
    in_turn = change.in_turn and bool(change.wants)
    turns = [list(group) for _, group in groupby(found, key=lambda m: m.turn)] if in_turn else [list(found)]
    for turn in turns:
        seen = observed(net, layer, turn, change, stream)
        own, others = change.of(net, layer, turn, seen)
        for matrix in turn:
            matrix.put(net, own[matrix.base].dequantize())
        made |= own
        tensors |= others
    return made, tensors


def observed(
    net: Net, layer: int, wanted: Sequence[Matrix], change: Change, stream: Stream | None
) -> Mapping[Key, Seen]:
    """What the calibration text shows of the inputs of matrices of `layer`, which the stream is before."""
    if stream is None or not change.wants:
        return {}
    most = -(-SAMPLE // stream.parts) if change.sample else 0
    readers = {(m.observed, m.place.expert): m for m in wanted}
    seen = {key: Seen(Inputs(m.columns(net), change.wants), most) for key, m in readers.items()}

    def see(role: str, expert: int | None, x: Tensor) -> None:
        if (role, expert) in seen:
            with readers[role, expert].named():
                seen[role, expert].add(x)

    stream.observe(net.layer(layer), see, {role for role, _ in seen})
    return seen
