"""Tensors that a family names or keeps in its own way, seen as everyone else's: `base.part`, and one per expert.

What is downstream (claim, the weight formats, quantization at load) thus knows one form. Nothing is copied: an expert
is a view of the mapped file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from quire.core.errors import ModelError
from quire.model.disk.checkpoint import TensorInfo, TensorSource
from quire.ops.arrays import AnyArray

A = TypeVar("A", bound=AnyArray)


@dataclass(frozen=True)
class Rewrite:
    r"""Tensors whose whole name matches `pattern`, and the name to see them under, a template of `re.Match.expand`.

    `stacked`: the first axis are experts, whose number takes the place of {} in `name`. `transposed`: the matrices are
    [k, n] on disk. `parts`: what takes the place of the next {}; each is the same number of rows, one part below the
    other or, `alternating`, row by row in turn.

    `release`: the family's own files have this form, called by this template of \1; "": they have that of `name`.
    `below`: so many experts lie below each other in one matrix instead, 0 = they do not. `columns`: matrices whose last
    axis is as long are not turned although it says `transposed`, as other tools write them; 0: all are.
    """

    pattern: str
    name: str
    stacked: bool = False
    transposed: bool = False
    parts: tuple[str, ...] = ()
    alternating: bool = False
    release: str = ""
    below: int = 0
    columns: int = 0

    def turns(self, last: int) -> bool:
        """Whether matrices are [k, n] on disk whose last axis there is `last`."""
        return self.transposed and last != self.columns

    def rows(self, height: int) -> list[tuple[str, slice | None]]:
        """The parts of `height` rows, each with its rows; one without a name when they are not parted."""
        if not self.parts:
            return [("", None)]
        count, each = len(self.parts), height // len(self.parts)
        return [
            (part, slice(i, None, count) if self.alternating else slice(i * each, (i + 1) * each))
            for i, part in enumerate(self.parts)
        ]


def renamed(name: str, rewrites: Iterable[Rewrite]) -> str:
    """The name under which a tensor of `name` is seen, where that is all that is done to it; else `name`."""
    for rule in rewrites:
        match = re.fullmatch(rule.pattern, name)
        if match is not None:
            return name if rule.stacked or rule.parts or rule.transposed else match.expand(rule.name)
    return name


@dataclass(frozen=True)
class _Origin:
    """Where a tensor is: that of the file, the expert of it or its rows, whether it is turned, and the rows of that."""

    name: str
    expert: int | slice | None = None
    transposed: bool = False
    rows: slice | None = None


class Rewritten:
    """A `TensorSource` seen through rewrites; the first that matches a name counts."""

    def __init__(self, source: TensorSource, rewrites: Sequence[Rewrite]) -> None:
        self.source = source
        self.infos: dict[str, TensorInfo] = {}
        self._from: dict[str, _Origin] = {}
        known = [(re.compile(r.pattern), r) for r in rewrites]
        for name, info in source.infos.items():
            found = next(((m, r) for p, r in known if (m := p.fullmatch(name))), None)
            if found is None:
                self._add(name, info, _Origin(name))
            else:
                self._rewrite(name, info, *found)

    def _rewrite(self, name: str, info: TensorInfo, match: re.Match[str], rule: Rewrite) -> None:
        if len(info.shape) < rule.stacked + (2 if rule.transposed else bool(rule.parts)):
            raise ModelError(f"{info.file}: {name} has the shape {list(info.shape)}, which is too few axes")
        shape, experts = _experts(name, info, rule)
        turned = rule.turns(shape[-1]) if shape else False
        shape = shape[::-1] if turned else shape
        height, count = (shape[0], len(rule.parts)) if rule.parts else (0, 1)
        if height % count:
            raise ModelError(f"{info.file}: {name} has {height} rows, which are not parted by {count}")
        one = TensorInfo(info.dtype, (height // count, *shape[1:]) if rule.parts else shape, info.file)
        new = match.expand(rule.name)
        for e, expert in enumerate(experts):
            number = None if expert is None else e
            for part, rows in rule.rows(height):
                words = [str(word) for word in (number, part or None) if word is not None]
                self._add(new.format(*words) if words else new, one, _Origin(name, expert, turned, rows))

    def _add(self, name: str, info: TensorInfo, origin: _Origin) -> None:
        if name in self.infos:
            raise ModelError(f"{info.file}: {origin.name} is there in two forms; remove one of them")
        self.infos[name] = info
        self._from[name] = origin

    @property
    def origins(self) -> dict[str, str]:
        """What the tensors are called in the file."""
        return {name: origin.name for name, origin in self._from.items()}

    def tensor(self, name: str) -> AnyArray:
        """The tensor `name`; the caller must not write to it."""
        return self.part(name, self.source.tensor(self._from[name].name))

    def part(self, name: str, whole: A) -> A:
        """The view of `whole`, shaped as the file's tensor is, that `name` stands for."""
        origin = self._from[name]
        tensor: AnyArray = whole if origin.expert is None else whole[origin.expert]
        tensor = tensor.T if origin.transposed else tensor
        return cast(A, tensor if origin.rows is None else tensor[origin.rows])

    def read_ahead(self, names: Iterable[str]) -> None:
        """Have the system read the tensors `names`."""
        self.source.read_ahead({self._from[name].name for name in names})

    def give_back(self) -> None:
        """Give back the memory of what was read; tensors handed out stay valid."""
        self.source.give_back()


def _experts(name: str, info: TensorInfo, rule: Rewrite) -> tuple[tuple[int, ...], list[int | slice | None]]:
    """The shape of one expert's part of a tensor of the file, and where each expert's lies; None: all of it."""
    if rule.stacked:
        return info.shape[1:], list(range(info.shape[0]))
    if not rule.below:
        return info.shape, [None]
    each, rest = divmod(info.shape[0], rule.below)
    if rest:
        raise ModelError(f"{info.file}: {name} has {info.shape[0]} rows, which are not parted by {rule.below} experts")
    return (each, *info.shape[1:]), [slice(e * each, (e + 1) * each) for e in range(rule.below)]
