"""Some tensors of a source, or some rows of them, as a source of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

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


class FirstRows(SourceSubset):
    """A `TensorSource` that has of some tensors of another, `rows` by name, that many rows alone, the first."""

    def __init__(self, source: TensorSource, rows: Mapping[str, int]) -> None:
        super().__init__(source, source.infos)
        self._rows = {name: count for name, count in rows.items() if name in self.infos}
        for name, count in self._rows.items():
            info = self.infos[name]
            self.infos[name] = replace(info, shape=(min(count, info.shape[0]), *info.shape[1:]))

    def tensor(self, name: str) -> AnyArray:
        """The tensor `name`; the caller must not write to it."""
        whole = self.source.tensor(name)
        return whole[: self._rows[name]] if name in self._rows else whole
