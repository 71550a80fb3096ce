"""Vectors of one number that a GGUF file has as a list with an entry for each layer, among its metadata."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from quire.core.dtypes import F32
from quire.gguf.file import GgufFile
from quire.model.disk.checkpoint import TensorInfo, TensorSource
from quire.ops.arrays import AnyArray


class ListedVectors:
    """A `TensorSource` that has, beside the tensors of `source`, those of `lists`: name of a tensor, with {} for the
    layer -> key of the list. A list that is one number is that of all `layers`."""

    def __init__(self, source: TensorSource, file: GgufFile, lists: Mapping[str, str], layers: int) -> None:
        self._source = source
        self._numbers: dict[str, AnyArray] = {}
        self.infos: dict[str, TensorInfo] = dict(source.infos)
        for name, key in lists.items():
            values = np.atleast_1d(np.asarray(file.metadata.get(key, ()), np.float32))
            values = np.repeat(values, layers) if len(values) == 1 else values
            if len(values) != layers:
                raise file.fail(key, f"has {len(values)} numbers, needs one for each of {layers} layers")
            for layer, value in enumerate(values):
                self._numbers[name.format(layer)] = np.array([value], np.float32)
                self.infos[name.format(layer)] = TensorInfo(F32, (1,), file.path.name)

    def tensor(self, name: str) -> AnyArray:
        """The tensor `name`; the caller must not write to it."""
        own = self._numbers.get(name)
        return self._source.tensor(name) if own is None else own

    def read_ahead(self, names: Iterable[str]) -> None:
        """Have the system read the tensors `names`."""
        self._source.read_ahead([name for name in names if name not in self._numbers])

    def give_back(self) -> None:
        """Give back the memory of what was read; tensors handed out stay valid."""
        self._source.give_back()
