"""Tensors that are one for each matrix, put together as a family's own files have them: the inverse of `rewrite`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from quire.model.disk.checkpoint import TensorInfo, TensorSource
from quire.model.disk.renamed_tensors import Rewrite, Rewritten
from quire.ops.arrays import to_torch

if TYPE_CHECKING:
    from torch import Tensor


def _names(rule: Rewrite) -> re.Pattern[str]:
    """Names that `rule` gives. The group "own" is what the first of its pattern held, with which that begins.

    "expert" and "part": what took the place of each {}.
    """
    own = rule.pattern[1 : rule.pattern.index(")")]
    text = re.escape(rule.name).replace(re.escape(r"\1"), f"(?P<own>{own})", 1)
    hole = re.escape("{}")
    if rule.stacked and hole in text:
        text = text.replace(hole, r"(?P<expert>\d+)", 1)
    return re.compile(text.replace(hole, f"(?P<part>{'|'.join(map(re.escape, rule.parts))})", 1))


class Released:
    """A `TensorSource` of those of `source`, which are named as rewrites name them, under the names of the release."""

    def __init__(self, source: TensorSource, rewrites: Sequence[Rewrite]) -> None:
        self._source = source
        self._members: dict[str, list[str]] = {}
        self.infos: dict[str, TensorInfo] = {}
        rules = [(_names(rule), rule) for rule in rewrites if rule.release]
        for name, info in source.infos.items():
            found = next(((match, rule) for names, rule in rules if (match := names.fullmatch(name))), None)
            if found is None:
                self.infos[name], self._members[name] = info, []
                continue
            match, rule = found
            whole = rule.release.replace(r"\1", match["own"])
            self._members.setdefault(whole, []).append(name)
            experts = int(match.groupdict().get("expert") or 0) + 1
            shape = (info.shape[0] * max(1, len(rule.parts)), *info.shape[1:])
            shape = shape[::-1] if rule.transposed else shape
            self.infos[whole] = TensorInfo(info.dtype, (experts, *shape) if rule.stacked else shape, info.file)
        self._cut = Rewritten(self, rewrites)

    def tensor(self, name: str) -> Tensor:
        """The tensor `name`, put together anew each time."""
        if not self._members[name]:
            return to_torch(self._source.tensor(name))
        parts = {member: to_torch(self._source.tensor(member)) for member in self._members[name]}
        whole = torch.empty(self.infos[name].shape, dtype=next(iter(parts.values())).dtype)
        for member, tensor in parts.items():
            self._cut.part(member, whole).copy_(tensor)
        return whole

    def read_ahead(self, names: Iterable[str]) -> None:
        """Have the system read what the tensors `names` are made of."""
        self._source.read_ahead([member for name in names for member in self._members[name] or [name]])

    def give_back(self) -> None:
        """Give back the memory of what was read; tensors handed out stay valid."""
        self._source.give_back()
