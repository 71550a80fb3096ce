"""The tensors of a checkpoint by their names on disk, of which some have new values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, MutableMapping

import torch
from torch import Tensor

from quire.core.dtypes import is_float
from quire.core.errors import ModelError
from quire.model.disk.checkpoint import TensorInfo, TensorSource
from quire.ops.arrays import to_torch
from quire.ops.lazy import torch_dtype


class Described(Mapping[str, Tensor], ABC):
    """Tensors by name, of which it is known what they are before they are read or made."""

    @abstractmethod
    def kind(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of the tensor `name`."""

    @abstractmethod
    def give_back(self) -> None:
        """Give back the memory of what was read; tensors handed out stay valid."""


class Tensors(Described, MutableMapping[str, Tensor]):
    """Name on disk -> tensor, floating-point ones in `dtype`. What was not set is read anew each time it is asked for.

    So a model of any size takes the memory of what was set. A tensor that was not set must not be written to: it may
    be a view of the file, whose pages are given back. Setting one of an unknown name or another shape: `ModelError`.
    Deleting one brings back the value of the file.
    """

    def __init__(self, source: TensorSource, dtype: torch.dtype) -> None:
        self.source, self.dtype = source, dtype
        self._set: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name in self._set:
            return self._set[name]
        if name not in self.source.infos:
            raise KeyError(name)
        tensor = to_torch(self.source.tensor(name))
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        if name not in self.source.infos:
            raise ModelError(f"{name} is not a tensor of this model; see `tensors` for their names")
        if tuple(tensor.shape) != self.shape(name):
            raise ModelError(f"{name} is {list(self.shape(name))}, not {list(tensor.shape)}; give one of its shape")
        self._set[name] = tensor

    def __delitem__(self, name: str) -> None:
        self._set.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self.source.infos  # a mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.source.infos)

    def __len__(self) -> int:
        return len(self.source.infos)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor `name`, without reading it."""
        return self.source.infos[name].shape

    def is_floating_point(self, name: str) -> bool:
        """Whether the tensor `name` holds such numbers."""
        return is_float(self.source.infos[name].dtype)

    def kind(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of the tensor `name`."""
        own = torch_dtype(self.source.infos[name].dtype)
        return self.dtype if own.is_floating_point else own, self.shape(name)

    def give_back(self) -> None:
        """Give back the memory of what was read of the file."""
        self.source.give_back()

    def own(self, name: str) -> Tensor:
        """The tensor `name` to write to in place: it is copied once, then it is the value that was set."""
        if name not in self._set:
            self._set[name] = self[name].clone()
        return self._set[name]

    def was_set(self, name: str) -> bool:
        """Whether the tensor `name` has another value than the file's."""
        return name in self._set


class Current:
    """A `TensorSource` of the values that `tensors` have when they are read."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self.infos: dict[str, TensorInfo] = tensors.source.infos

    def tensor(self, name: str) -> Tensor:
        """The tensor `name`; the caller must not write to it."""
        return self._tensors[name]

    def read_ahead(self, names: Iterable[str]) -> None:
        """Have the system read those of `names` that are the file's."""
        self._tensors.source.read_ahead([name for name in names if not self._tensors.was_set(name)])

    def give_back(self) -> None:
        """Give back the memory of what was read; tensors handed out stay valid."""
        self._tensors.source.give_back()
