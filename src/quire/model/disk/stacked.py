"""Tensors that a checkpoint keeps in pieces, seen as the one tensor a role asks for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from quire.model.disk.checkpoint import TensorInfo, TensorSource
from quire.model.families.row import Family
from quire.model.load.roles import DISK_ROLES
from quire.ops.arrays import AnyArray, concat, stack


class StackedSource:
    """A `TensorSource` in which the numbered pieces `family.stacks` names are rows of one tensor named as the role
    is, or of a table, one below the other."""

    def __init__(self, source: TensorSource, family: Family, layers: int) -> None:
        self._source = source
        self._pieces: dict[str, list[str]] = {}
        self._below: set[str] = set()
        self.infos: dict[str, TensorInfo] = dict(source.infos)
        for role, piece in family.stacks.items():
            if not DISK_ROLES[role].layer:
                self._join(f"{family.names[role]}.weight", f"{family.names[role]}{piece}.weight", True)
                continue
            for layer in range(layers):
                prefix = family.names["layer"].format(layer)
                self._join(f"{prefix}{family.names[role]}.weight", f"{prefix}{piece}.weight", False)

    def _join(self, whole: str, piece: str, below: bool) -> None:
        names: list[str] = []
        while (name := piece.format(len(names))) in self.infos:
            names.append(name)
        first = self.infos.get(piece.format(0))
        if first is None or any(self.infos[n].shape[below:] != first.shape[below:] for n in names):
            return
        heights = [self.infos[name].shape[0] for name in names]
        if below and (set(heights[:-1]) - {heights[0]} or heights[-1] > heights[0]):
            return
        rows = (sum(heights),) if below else (len(names), first.shape[0])
        for name in names:
            del self.infos[name]
        self.infos[whole] = replace(first, shape=(*rows, *first.shape[1:]))
        self._below |= {whole} if below else set()
        self._pieces[whole] = names

    def tensor(self, name: str) -> AnyArray:
        """The tensor `name`, put together when it lies in pieces."""
        pieces = self.pieces(name)
        if name not in self._pieces:
            return pieces[0]
        if name not in self._below:
            return stack(pieces)
        return pieces[0] if len(pieces) == 1 else concat(pieces)

    def pieces(self, name: str) -> list[AnyArray]:
        """What the tensor `name` is put together of, each where it lies."""
        return [self._source.tensor(piece) for piece in self._pieces.get(name, [name])]

    def read_ahead(self, names: Iterable[str]) -> None:
        """Have the system read the tensors `names`."""
        self._source.read_ahead([piece for name in names for piece in self._pieces.get(name, [name])])

    def give_back(self) -> None:
        """Give back the memory of what was read; tensors handed out stay valid."""
        self._source.give_back()
