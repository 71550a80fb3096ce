"""Some tensors of a source, as a source of their own."""

from __future__ import annotations

from collections.abc import Iterable

from quire.model.disk.checkpoint import TensorInfo, TensorSource
from quire.ops.arrays import AnyArray


class SourceSubset:
    """A `TensorSource` of some tensors of another, as they are."""

    def __init__(self, source: TensorSource, names: Iterable[str]) -> None:
        self.source = source
        self.infos: dict[str, TensorInfo] = {name: source.infos[name] for name in names}

    def tensor(self, name: str) -> AnyArray:
        """The tensor `name`; the caller must not write to it."""
        return self.source.tensor(name)

    def read_ahead(self, names: Iterable[str]) -> None:
        """Have the system read the tensors `names`."""
        self.source.read_ahead(names)

    def give_back(self) -> None:
        """Give back the memory of what was read; tensors handed out stay valid."""
        self.source.give_back()
