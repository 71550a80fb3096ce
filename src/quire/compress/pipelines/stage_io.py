"""Input and output of a stage: its context, and the model's tensors with changed matrices that it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.compress.calibration.text import CalibrationRows
from quire.compress.checkpoint.linear_weights import LinearWeight, linear_weights
from quire.compress.checkpoint.net import Net
from quire.compress.checkpoint.tensors import LazyTensors
from quire.compress.checkpoint.writer import atomic_folder, copy_tokenizer_files, with_dtype, write_json, write_tensors
from quire.compress.layouts.base import Layout
from quire.compress.layouts.compressed_tensors import CompressedTensorsLayout
from quire.compress.pipelines.layerwise import ModifiedLayer, kv_peaks_unit, load_layer
from quire.compress.quantize.kv_cache import KvCachePeaks
from quire.compress.recipes.parser import Recipe
from quire.compress.recipes.stages import Stage
from quire.compress.tracking.journal import WorkFolder
from quire.core.dtypes import Dtype
from quire.core.errors import ConfigError
from quire.model.load.roles import DISK_ROLES, FUSED
from quire.ops.weights import Weight


@dataclass(frozen=True)
class StageContext:
    """The context of a stage, which reads the model in `model` and writes one to `target`, which is not there yet.

    `number`: of the stage in `recipe`; `teacher`: the model that the recipe began with. `rows`: calibration text, read
    when it is asked for. `spill`: a folder for what does not have to be in memory, None = all is. `report(what is
    next)` is called after each of the stage's units.
    """

    number: int
    model: str
    target: Path
    teacher: str
    recipe: Recipe
    work: WorkFolder
    rows: Callable[[], CalibrationRows]
    report: Callable[[str], None]
    spill: Path | None = None

    @property
    def last(self) -> bool:
        """Whether the stage writes the result."""
        return self.number == len(self.recipe.stages) - 1


UNMODIFIED = Weight("f32", torch.zeros(1, 1))
"""Stands for the weight of a matrix that a stage left as it was."""


class ModifiedLayers:
    """Matrices that a stage has changed, by unit, read again when they are asked for: one layer is in memory."""

    def __init__(self, net: Net, context: StageContext, stage: Stage) -> None:
        self._net, self._work, self._number = net, context.work, context.number
        self._matrices = {
            i: [m for m in linear_weights(net, i) if stage.covers(m.base)] for i in range(net.spec.layers)
        }
        self._at = -1
        self._made: ModifiedLayer = {}, {}
        self.tensors = self._others()

    @property
    def all(self) -> list[LinearWeight]:
        """All matrices that were changed."""
        return [matrix for found in self._matrices.values() for matrix in found]

    def weight(self, matrix: LinearWeight) -> Weight:
        """Return the new form of a matrix."""
        assert matrix.place.layer is not None
        return self._of(matrix.place.layer)[0][matrix.base]

    def with_suffix(self, suffix: str) -> dict[str, Tensor]:
        """Return the tensors whose names end in `suffix`, by the names of their matrices."""
        return {name.removesuffix(suffix): t for name, t in self.tensors.items() if name.endswith(suffix)}

    def cache_scales(self, layout: CompressedTensorsLayout, dtype: Dtype) -> dict[str, Tensor]:
        """Return the scales of each layer's keys and values in a cache of `dtype`, by their names on disk."""
        found: dict[str, Tensor] = {}
        for layer in range(self._net.spec.layers):
            peaks = KvCachePeaks(**self._work.facts(self._number, kv_peaks_unit(layer)))
            keys = next(m for m in linear_weights(self._net, layer) if "k" in FUSED.get(m.holder, (m.holder,)))
            found |= layout.cache_tensors(keys.base.rpartition(".")[0], *peaks.scales(dtype))
        return found

    def _of(self, layer: int) -> ModifiedLayer:
        if layer != self._at:
            self._at, self._made = layer, load_layer(self._work, self._number, f"layer {layer}")
        return self._made

    def _others(self) -> dict[str, Tensor]:
        """Tensors that changed with matrices (norms, biases: vectors, all of which fit in memory)."""
        return {name: tensor for layer in self._matrices for name, tensor in self._of(layer)[1].items()}


class DenseTensors(LazyTensors):
    """Tensors of the model as they are named on disk, changed matrices in their places as plain numbers."""

    def __init__(self, net: Net, layers: ModifiedLayers) -> None:
        self._net, self._layers = net, layers
        self._held: dict[str, list[LinearWeight]] = {}
        for matrix in layers.all:
            self._held.setdefault(net.rewritten.origins[matrix.name], []).append(matrix)

    def __getitem__(self, name: str) -> Tensor:
        held = self._held.get(name, [])
        for matrix in held:
            matrix.assign(self._net, self._layers.weight(matrix).dequantize())
        found = self._net.tensors[name] if held else self._layers.tensors.get(name, self._net.tensors.get(name))
        if found is None:
            raise KeyError(name)
        for matrix in held[:1]:
            matrix.restore(self._net)
        return found

    def dtype_and_shape(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return the dtype and shape of the model's tensor."""
        return self._net.tensors.dtype_and_shape(name)

    def give_back(self) -> None:
        """Give back the memory of the file's pages."""
        self._net.tensors.give_back()

    def __iter__(self) -> Iterator[str]:
        return iter(self._net.tensors)

    def __len__(self) -> int:
        return len(self._net.tensors)


class LazyWeights(Mapping[str, Weight]):
    """Weights of linear layers by their names on disk, each read when it is asked for; `UNMODIFIED` where it did not
    change."""

    def __init__(self, layers: ModifiedLayers, linear_weights: Mapping[str, LinearWeight | None]) -> None:
        self._layers, self._matrices = layers, linear_weights

    def __getitem__(self, base: str) -> Weight:
        matrix = self._matrices[base]
        return UNMODIFIED if matrix is None else self._layers.weight(matrix)

    def __iter__(self) -> Iterator[str]:
        return iter(self._matrices)

    def __len__(self) -> int:
        return len(self._matrices)


class PackedTensors(LazyTensors):
    """Tensors of the model as they are named on disk, each changed matrix in a layout's tensors."""

    def __init__(self, net: Net, layers: ModifiedLayers, layout: Layout) -> None:
        self._net, self._layers, self._layout = net, layers, layout
        self._parts: dict[str, LinearWeight] = {}
        self._kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        laid: dict[str, LinearWeight | None] = {}
        taken = set()
        for matrix in layers.all:
            if net.rewritten.origins[matrix.name] != matrix.name:
                raise ConfigError(
                    f"layout {layout.name}: {matrix.base} lies in a stack of experts, which it does not know; write it "
                    "dense, or leave it out with ignore"
                )
            for name, tensor in self._laid(matrix).items():
                self._parts[name], self._kinds[name] = matrix, (tensor.dtype, tuple(tensor.shape))
            laid[matrix.base] = matrix
            taken.add(matrix.name)
        drafts = () if net.opened.mtp is None else net.opened.mtp.claim.parts.items()
        for (role, _), parts in (*net.opened.claim.parts.items(), *drafts):
            base = parts.get("weight", "").removesuffix(".weight")
            if DISK_ROLES[role].kind == "linear" and base:
                laid.setdefault(base, None)
        self.described = LazyWeights(layers, laid)
        there = dict.fromkeys([*net.tensors, *layers.tensors])
        self._others = [n for n in there if n not in taken and n not in self._parts]
        self._kept: tuple[str, dict[str, Tensor]] = "", {}

    def __getitem__(self, name: str) -> Tensor:
        matrix = self._parts.get(name)
        if matrix is None:
            return self._layers.tensors[name] if name in self._layers.tensors else self._net.tensors[name]
        if self._kept[0] != matrix.base:
            self._kept = matrix.base, self._laid(matrix)
        return self._kept[1][name]

    def dtype_and_shape(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return the dtype and shape of the tensor `name`."""
        if name in self._kinds:
            return self._kinds[name]
        own = self._layers.tensors.get(name)
        return self._net.tensors.dtype_and_shape(name) if own is None else (own.dtype, tuple(own.shape))

    def give_back(self) -> None:
        """Give back the memory of the file's pages."""
        self._net.tensors.give_back()

    def __iter__(self) -> Iterator[str]:
        yield from self._others
        yield from self._parts

    def __len__(self) -> int:
        return len(self._others) + len(self._parts)

    def _laid(self, matrix: LinearWeight) -> dict[str, Tensor]:
        name = f"{matrix.base}.bias"
        bias = self._layers.tensors.get(name, self._net.tensors.get(name))
        return self._layout.tensors(matrix.base, self._layers.weight(matrix), bias)


def write_dense(context: StageContext, net: Net, layers: ModifiedLayers, dtype: torch.dtype) -> None:
    """Write the model with its changed matrices as plain numbers."""
    write_stage_output(context, net, DenseTensors(net, layers), net.config, dtype)


def write_packed(context: StageContext, net: Net, layers: ModifiedLayers, layout: Layout, dtype: torch.dtype) -> None:
    """Write the model with its changed matrices in `layout`; what is not changed is written in `dtype`."""
    laid = PackedTensors(net, layers, layout)
    write_stage_output(context, net, laid, {**net.config, "quantization_config": layout.config(laid.described)}, dtype)


def write_stage_output(
    context: StageContext, net: Net, tensors: Mapping[str, Tensor], config: Mapping[str, Any], dtype: torch.dtype
) -> None:
    """Write a folder of `tensors`; f32 tensors that the model itself has are written in `dtype`."""
    with atomic_folder(context.target) as folder:
        write_tensors(folder, _InCheckpointDtype(tensors, net, dtype), None)
        write_json(folder / "config.json", with_dtype(config, dtype))
        copy_tokenizer_files(net.folder, folder)


class _InCheckpointDtype(LazyTensors):
    """Tensors of the model itself in its dtype; scales and codes of a layout stay as they are."""

    def __init__(self, tensors: Mapping[str, Tensor], net: Net, dtype: torch.dtype) -> None:
        self._tensors, self._net, self._dtype = tensors, net, dtype

    def __getitem__(self, name: str) -> Tensor:
        found = self._tensors[name]
        return found.to(self._own(name, found.dtype))

    def dtype_and_shape(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return the dtype and shape of the tensor `name`."""
        if isinstance(self._tensors, LazyTensors):
            dtype, shape = self._tensors.dtype_and_shape(name)
        else:
            dtype, shape = self._tensors[name].dtype, tuple(self._tensors[name].shape)
        return self._own(name, dtype), shape

    def give_back(self) -> None:
        """Give back the memory of the file's pages."""
        self._net.tensors.give_back()

    def _own(self, name: str, found: torch.dtype) -> torch.dtype:
        return self._dtype if name in self._net.tensors and found is torch.float32 else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
