"""Small tensors that a checkpoint keeps one by one, seen as the one tensor a role asks for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from quire.model.disk.checkpoint import TensorInfo, TensorSource
from quire.model.families.row import Family
from quire.ops.arrays import AnyArray, stack


class StackedSource:
    """A `TensorSource` in which the numbered pieces `family.stacks` names are rows of one tensor named as the role
    is."""

    def __init__(self, source: TensorSource, family: Family, layers: int) -> None:
        self._source = source
        self._pieces: dict[str, list[str]] = {}
        self.infos: dict[str, TensorInfo] = dict(source.infos)
        for role, piece in family.stacks.items():
            for layer in range(layers):
                prefix = family.names["layer"].format(layer)
                self._join(f"{prefix}{family.names[role]}.weight", f"{prefix}{piece}.weight")

    def _join(self, whole: str, piece: str) -> None:
        names: list[str] = []
        while (name := piece.format(len(names))) in self.infos:
            names.append(name)
        first = self.infos.get(piece.format(0))
        if first is None or any(self.infos[n].shape != first.shape for n in names):
            return
        for name in names:
            del self.infos[name]
        self.infos[whole] = replace(first, shape=(len(names), *first.shape))
        self._pieces[whole] = names

    def tensor(self, name: str) -> AnyArray:
        """The tensor `name`, put together when it lies in pieces."""
        pieces = self._pieces.get(name)
        return self._source.tensor(name) if pieces is None else stack([self._source.tensor(n) for n in pieces])

    def read_ahead(self, names: Iterable[str]) -> None:
        """Have the system read the tensors `names`."""
        self._source.read_ahead([piece for name in names for piece in self._pieces.get(name, [name])])

    def give_back(self) -> None:
        """Give back the memory of what was read; tensors handed out stay valid."""
        self._source.give_back()
