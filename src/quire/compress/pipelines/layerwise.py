"""Modification of a model layer by layer, each matrix with statistics of its inputs on calibration text.

A layer reads the text as the changed layers before it make it, and so makes up for a part of what they cost (as GPTQ
does, Frantar et al. 2023). A layer's new weights are saved before the next begins: a run that is killed resumes there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.compress.calibration.hidden_states import HiddenStates
from quire.compress.calibration.statistics import InputStatistics
from quire.compress.checkpoint.linear_weights import LinearWeight, linear_weights
from quire.compress.checkpoint.net import Net
from quire.compress.quantize.kv_cache import KvCachePeaks
from quire.compress.recipes.stages import Stage
from quire.compress.tracking.journal import WorkFolder
from quire.core.progress import stage
from quire.ops.weights import ARRAYS, Weight

InputKey = tuple[str, int | None]
"""The role whose input rows are looked at, and the expert."""
SAMPLE_ROWS = 512
"""Rows of inputs that are stored as they are, where a method needs some."""
TENSOR_PREFIX = "tensor "
"""Prefix of the names, in a unit, of tensors that are no matrices of the stage."""


@dataclass
class Observations:
    """Observations of the rows that matrices read on calibration text: statistics, and a few rows [T, k] f32
    themselves."""

    inputs: InputStatistics
    most: int = 0
    rows: list[Tensor] = field(default_factory=list)

    def add(self, x: Tensor) -> None:
        """Add the rows of a part of the text; of each part evenly spaced ones are kept."""
        self.inputs.add(x)
        if self.most and len(x):
            self.rows.append(x[:: -(-len(x) // self.most)].clone())

    @property
    def sample(self) -> Tensor:
        """The rows that were kept."""
        return torch.cat(self.rows)


InputObservations = Mapping[InputKey, Observations]
"""Observations of the inputs of a layer's matrices."""
MatrixMethod = Callable[[Tensor, InputStatistics | None], Weight]
ModifiedLayer = tuple[dict[str, Weight], dict[str, Tensor]]
"""New forms of matrices by their base names, and other tensors that changed with them, by their names on disk."""


@dataclass(frozen=True)
class LayerModifier:
    """A change that a stage makes to the matrices of each layer.

    `modify(net, layer, matrices, observations of their inputs)` returns what the layer becomes. `statistics`: parts of
    `InputStatistics` that it needs; none: no calibration text is read. `sample`: whether it needs rows of inputs
    themselves. `sequential`: it is called once for each set of matrices that read the same input, and later sets see
    the output of changed ones of the same layer, at the price of another pass of the text for each set. `kv_cache`:
    whether peaks of keys and values are measured, which are saved as unit `kv_peaks_unit(layer)`.
    """

    modify: Callable[[Net, int, Sequence[LinearWeight], InputObservations], ModifiedLayer]
    statistics: tuple[str, ...] = ()
    sample: bool = False
    sequential: bool = True
    kv_cache: bool = False

    @property
    def reads(self) -> bool:
        """Whether the modifier needs calibration text."""
        return bool(self.statistics) or self.kv_cache


def per_matrix(
    change: MatrixMethod,
) -> Callable[[Net, int, Sequence[LinearWeight], InputObservations], ModifiedLayer]:
    """Make a modifier's function that changes one matrix w [n, k] f32 after another: `change(w, statistics of its
    inputs)`."""

    def modify(net: Net, layer: int, wanted: Sequence[LinearWeight], observed: InputObservations) -> ModifiedLayer:
        made = {}
        for matrix in wanted:
            with matrix.error_context():
                own = observed.get((matrix.input_role, matrix.place.expert))
                made[matrix.base] = change(matrix.read(net), None if own is None else own.inputs)
        return made, {}

    return modify


def per_shared_input(
    change: Callable[[Iterator[Tensor], InputStatistics], Iterator[Weight]],
) -> Callable[[Net, int, Sequence[LinearWeight], InputObservations], ModifiedLayer]:
    """Make a modifier's function that changes all matrices w [n, k] f32 that read the same input, each when it is asked
    for.

    `change(these, statistics of their inputs)`: the statistics are of no others, and may be used up.
    """

    def modify(net: Net, layer: int, wanted: Sequence[LinearWeight], observed: InputObservations) -> ModifiedLayer:
        made, groups = dict[str, Weight](), dict[InputKey, list[LinearWeight]]()
        for matrix in wanted:
            groups.setdefault((matrix.input_role, matrix.place.expert), []).append(matrix)
        for key, members in groups.items():
            weights = change((m.read(net) for m in members), observed[key].inputs)
            for matrix in members:
                with matrix.error_context():
                    made[matrix.base] = next(weights)
        return made, {}

    return modify


def modify_layers(
    net: Net,
    stage: tuple[int, Stage],
    change: LayerModifier,
    rows: Sequence[Sequence[int]],
    work: WorkFolder,
    report: Callable[[str], None],
    spill: Path | None = None,
) -> None:
    """Change all layers of `net` and save each matrix's new form in `work`, as unit "layer N" of the stage.

    `stage`: its number, and its options. `rows`: calibration text. `spill`: a folder for hidden states, None = memory.
    `report(what is next)` after each layer. `ModelError` names the matrix that cannot be changed.
    """
    number, asked = stage
    states = HiddenStates(net, rows, spill) if change.reads else None
    for layer in range(net.spec.layers):
        found = [m for m in linear_weights(net, layer) if asked.covers(m.base)]
        name = f"layer {layer}"
        if not work.done(number, name):
            made, tensors = _modify_layer(net, layer, found, change, states)
            others = {TENSOR_PREFIX + disk: Weight("f32", tensor) for disk, tensor in tensors.items()}
            work.save(number, name, *weights_to_tensors(made | others))
        made, tensors = load_layer(work, number, name)
        for disk, tensor in tensors.items():
            if disk in net.tensors:  # else it is of the layout
                net.set(disk, tensor)
        for matrix in found:
            matrix.assign(net, made[matrix.base].dequantize())
        if states is not None and (change.kv_cache or layer + 1 < net.spec.layers):
            peaks = KvCachePeaks()
            with net.watch_cache(peaks.add):
                states.advance(net.layer(layer))
            if change.kv_cache and not work.done(number, kv_peaks_unit(layer)):
                work.save(number, kv_peaks_unit(layer), {}, {"key": peaks.key, "value": peaks.value})
        for matrix in found:
            matrix.restore(net)
        for disk in tensors:
            net.tensors.pop(disk, None)
        report(f"layer {layer + 2} of {net.spec.layers}" if layer + 1 < net.spec.layers else "writing")


def kv_peaks_unit(layer: int) -> str:
    """Name the unit that holds the peaks of a layer's keys and values."""
    return f"cache {layer}"


def load_layer(work: WorkFolder, number: int, name: str) -> ModifiedLayer:
    """Load what was saved of a layer."""
    kept = weights_from_tensors(work.tensors(number, name), work.facts(number, name))
    tensors = {
        key.removeprefix(TENSOR_PREFIX): weight.codes for key, weight in kept.items() if key.startswith(TENSOR_PREFIX)
    }
    return {key: weight for key, weight in kept.items() if not key.startswith(TENSOR_PREFIX)}, tensors


def _modify_layer(
    net: Net, layer: int, found: Sequence[LinearWeight], change: LayerModifier, states: HiddenStates | None
) -> ModifiedLayer:
    """Compute the new forms of a layer's matrices, which are assigned in `net` afterwards."""
    made, tensors = dict[str, Weight](), dict[str, Tensor]()
    for matrix in found:
        matrix.check(net)
    in_turn = change.sequential and bool(change.statistics)
    turns = [list(group) for _, group in groupby(found, key=lambda m: m.position)] if in_turn else [list(found)]
    with stage(f"layer {layer + 1}: matrices", len(found)) as at:
        for turn in turns:
            observed = observe_inputs(net, layer, turn, change, states)
            own, others = change.modify(net, layer, turn, observed)
            for matrix in turn:
                matrix.assign(net, own[matrix.base].dequantize())
            made |= own
            tensors |= others
            at.advance(len(turn))
    return made, tensors


def observe_inputs(
    net: Net, layer: int, wanted: Sequence[LinearWeight], change: LayerModifier, states: HiddenStates | None
) -> InputObservations:
    """Observe the inputs of matrices of `layer` on the calibration text, whose hidden states are those before it."""
    if states is None or not change.statistics:
        return {}
    most = -(-SAMPLE_ROWS // states.parts) if change.sample else 0
    readers = {(m.input_role, m.place.expert): m for m in wanted}
    observed = {
        key: Observations(InputStatistics(m.columns(net), change.statistics), most) for key, m in readers.items()
    }

    def see(role: str, expert: int | None, x: Tensor) -> None:
        if (role, expert) in observed:
            with readers[role, expert].error_context():
                observed[role, expert].add(x)

    states.observe(net.layer(layer), see, {role for role, _ in observed})
    return observed


SCALAR_FIELDS = tuple(f.name for f in fields(Weight) if f.name not in ARRAYS)


def weights_to_tensors(weights: Mapping[str, Weight]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Convert weights by name to (tensors by "name/part", facts by name)."""
    tensors = {
        f"{name}/{part}": tensor
        for name, weight in weights.items()
        for part in ARRAYS
        if (tensor := getattr(weight, part)) is not None
    }
    return tensors, {name: {fact: getattr(weight, fact) for fact in SCALAR_FIELDS} for name, weight in weights.items()}


def weights_from_tensors(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> dict[str, Weight]:
    """Convert what `weights_to_tensors` returned back to weights by name."""
    parts: dict[str, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition("/")
        parts.setdefault(name, {})[part] = tensor
    return {name: Weight(**found, **facts[name]) for name, found in parts.items()}
