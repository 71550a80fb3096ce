"""Tensors that a family names or keeps in its own way, seen as everyone else's: `base.part`, and one per expert.

What is downstream (claim, the weight formats, quantization at load) thus knows one form. Nothing is copied: an expert
is a view of the mapped file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.core.errors import ModelError
from quire.model.disk.checkpoint import Source, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Rewrite:
    """Tensors whose whole name matches `pattern`, and the name to see them under, a template of `re.Match.expand`.

    `stacked`: the first axis are experts, whose number takes the place of {} in `name`. `transposed`: the matrices are
    [k, n] on disk.
    """

    pattern: str
    name: str
    stacked: bool = False
    transposed: bool = False


class Rewritten:
    """A `Source` seen through rewrites; the first that matches a name counts."""

    def __init__(self, source: Source, rewrites: Sequence[Rewrite]) -> None:
        self.source = source
        self.infos: dict[str, TensorInfo] = {}
        self._from: dict[str, tuple[str, int | None, bool]] = {}
        known = [(re.compile(r.pattern), r) for r in rewrites]
        for name, info in source.infos.items():
            found = next(((m, r) for p, r in known if (m := p.fullmatch(name))), None)
            if found is None:
                self._add(name, info, name, None, False)
                continue
            match, rule = found
            if len(info.shape) < 1 + rule.stacked + rule.transposed:
                raise ModelError(f"{info.file}: {name} has the shape {list(info.shape)}, which is too few axes")
            shape = info.shape[1:] if rule.stacked else info.shape
            one = TensorInfo(info.dtype, shape[::-1] if rule.transposed else shape, info.file)
            new = match.expand(rule.name)
            for e in range(info.shape[0]) if rule.stacked else (None,):
                self._add(new if e is None else new.format(e), one, name, e, rule.transposed)

    def _add(self, name: str, info: TensorInfo, origin: str, expert: int | None, transposed: bool) -> None:
        if name in self.infos:
            raise ModelError(f"{info.file}: {origin} is there in two forms; remove one of them")
        self.infos[name] = info
        self._from[name] = origin, expert, transposed

    @property
    def origins(self) -> dict[str, str]:
        """What the tensors are called in the file."""
        return {name: origin for name, (origin, *_) in self._from.items()}

    def tensor(self, name: str) -> Tensor:
        """The tensor `name`; the caller must not write to it."""
        origin, expert, transposed = self._from[name]
        tensor = self.source.tensor(origin)
        tensor = tensor if expert is None else tensor[expert]
        return tensor.t() if transposed else tensor

    def read_ahead(self, names: Iterable[str]) -> None:
        """Have the system read the tensors `names`."""
        self.source.read_ahead({self._from[name][0] for name in names})

    def give_back(self) -> None:
        """Give back the memory of what was read; tensors handed out stay valid."""
        self.source.give_back()
