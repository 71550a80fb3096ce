"""What a stage over layers leaves: the model's tensors with changed matrices, or these in a layout of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from quire.compress.context import Context
from quire.compress.layerwise import of_unit
from quire.compress.layouts.base import Layout
from quire.compress.matrices import Matrix, matrices
from quire.compress.net import Net
from quire.compress.stages import Stage
from quire.compress.write import copy_beside, whole_folder, with_dtype, write_json, write_tensors
from quire.core.errors import ConfigError
from quire.ops.lazy import torch_dtype
from quire.ops.weights import Weight


class Layers:
    """The matrices that a stage has changed, by unit, read again when they are asked for: one layer is in memory."""

    def __init__(self, net: Net, context: Context, stage: Stage) -> None:
        self._net, self._work, self._number = net, context.work, context.number
        self._matrices = {i: [m for m in matrices(net, i) if stage.covers(m.base)] for i in range(net.spec.layers)}
        self._at, self._weights = -1, dict[str, Weight]()

    @property
    def all(self) -> list[Matrix]:
        """Every matrix that was changed."""
        return [matrix for found in self._matrices.values() for matrix in found]

    def weight(self, matrix: Matrix) -> Weight:
        """What it became."""
        layer = matrix.place.layer
        assert layer is not None
        if layer != self._at:
            found = of_unit(self._work, self._number, f"layer {layer}", self._matrices[layer])
            self._at, self._weights = layer, {m.base: weight for m, weight in found}
        return self._weights[matrix.base]


class Dense(Mapping[str, Tensor]):
    """The model's tensors as they are named on disk, changed matrices in their places as plain numbers."""

    def __init__(self, net: Net, layers: Layers) -> None:
        self._net, self._layers = net, layers
        self._held: dict[str, list[Matrix]] = {}
        for matrix in layers.all:
            self._held.setdefault(net.rewritten.origins[matrix.name], []).append(matrix)

    def __getitem__(self, name: str) -> Tensor:
        held = self._held.get(name, [])
        for matrix in held:
            matrix.put(self._net, self._layers.weight(matrix).dequantize())
        found = self._net.tensors[name]
        for matrix in held[:1]:
            matrix.forget(self._net)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._net.tensors)

    def __len__(self) -> int:
        return len(self._net.tensors)


class Laid(Mapping[str, Tensor]):
    """The same with each changed matrix in a layout's tensors."""

    def __init__(self, net: Net, layers: Layers, layout: Layout) -> None:
        self._net, self._layers, self._layout = net, layers, layout
        self._parts: dict[str, Matrix] = {}
        self.described: dict[str, Weight] = {}
        taken = set()
        for matrix in layers.all:
            if net.rewritten.origins[matrix.name] != matrix.name:
                raise ConfigError(
                    f"layout {layout.name}: {matrix.base} lies in a stack of experts, which it does not know; write it "
                    "dense, or leave it out with ignore"
                )
            weight = layers.weight(matrix)
            self._parts |= dict.fromkeys(self._laid(matrix), matrix)
            self.described[matrix.base] = _without_numbers(weight)
            taken.add(matrix.name)
        self._others = [name for name in net.tensors if name not in taken and name not in self._parts]
        self._kept: tuple[str, dict[str, Tensor]] = "", {}

    def __getitem__(self, name: str) -> Tensor:
        matrix = self._parts.get(name)
        if matrix is None:
            return self._net.tensors[name]
        if self._kept[0] != matrix.base:
            self._kept = matrix.base, self._laid(matrix)
        return self._kept[1][name]

    def __iter__(self) -> Iterator[str]:
        yield from self._others
        yield from self._parts

    def __len__(self) -> int:
        return len(self._others) + len(self._parts)

    def _laid(self, matrix: Matrix) -> dict[str, Tensor]:
        bias = self._net.tensors.get(f"{matrix.base}.bias")
        return self._layout.tensors(matrix.base, self._layers.weight(matrix), bias)


def _without_numbers(weight: Weight) -> Weight:
    """What a layout's config is made from: formats and shapes; codes of one row."""
    return weight.take_rows(slice(0, 1))


def own_dtype(net: Net) -> torch.dtype:
    """Of a model's numbers in its files."""
    return torch_dtype(net.opened.dtype)


def write_dense(context: Context, net: Net, layers: Layers, dtype: torch.dtype) -> None:
    """The model with its changed matrices as plain numbers."""
    write(context, net, Dense(net, layers), net.config, dtype)


def write_laid(context: Context, net: Net, layers: Layers, layout: Layout, dtype: torch.dtype) -> None:
    """The model with its changed matrices in `layout`; what is not changed is written in `dtype`."""
    laid = Laid(net, layers, layout)
    write(context, net, laid, {**net.config, "quantization_config": layout.config(laid.described)}, dtype)


def write(
    context: Context, net: Net, tensors: Mapping[str, Tensor], config: Mapping[str, Any], dtype: torch.dtype
) -> None:
    """A folder of `tensors`, those of f32 that the model itself has in `dtype`."""
    with whole_folder(context.target) as folder:
        write_tensors(folder, _Narrowed(tensors, net, dtype), None)
        write_json(folder / "config.json", with_dtype(config, dtype))
        copy_beside(net.folder, folder)


class _Narrowed(Mapping[str, Tensor]):
    """Tensors of the model itself in its dtype; scales and codes of a layout stay as they are."""

    def __init__(self, tensors: Mapping[str, Tensor], net: Net, dtype: torch.dtype) -> None:
        self._tensors, self._net, self._dtype = tensors, net, dtype

    def __getitem__(self, name: str) -> Tensor:
        found = self._tensors[name]
        own = name in self._net.tensors and found.is_floating_point()
        return found.to(self._dtype) if own else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
