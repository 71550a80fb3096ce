"""A net whose tensors are seen through a training method, run layer by layer.

A method is a function of a tensor's name and numbers, applied where the reader reads them: low-rank changes, fake
quantization, masks. So methods compose as functions do, and every family has them all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from quire.compress.net import Net
from quire.compress.plain import Plain, as_plain
from quire.core.errors import ConfigError
from quire.model.describe import open_model
from quire.model.disk.checkpoint import TensorSource
from quire.model.disk.headers import ModelHeaders
from quire.model.load.adapter_files import module_of
from quire.model.load.roles import DISK_ROLES
from quire.model.net.decoder import Decoder
from quire.ops.arrays import to_torch

Value = Callable[[str, Tensor], Tensor]
"""(name of a tensor, its numbers) -> what the decoder is made of instead, of the same shape."""


class Codes(Protocol):
    """A tensor kept in fewer bits."""

    def dequantize(self) -> Tensor:
        """The tensor, f32."""
        ...


class Seen:
    """A `TensorSource` through `values`, one after the other; `frozen`: tensors that are kept as codes instead."""

    def __init__(self, source: TensorSource) -> None:
        self._source, self.infos = source, source.infos
        self.values: list[Value] = []
        self.frozen: dict[str, Codes] = {}

    def tensor(self, name: str) -> Tensor:
        """The tensor `name` as the methods make it."""
        tensor = self.frozen[name].dequantize() if name in self.frozen else to_torch(self._source.tensor(name))
        for value in self.values:
            tensor = value(name, tensor)
        return tensor

    def read_ahead(self, names: Iterable[str]) -> None:
        """Have the system read those of `names` that are not kept as codes."""
        self._source.read_ahead([name for name in names if name not in self.frozen])

    def give_back(self) -> None:
        """Give back the memory of what was read."""
        self._source.give_back()


class SeenNet(Net):
    """A net that `seen.values` change. Tensors are seen by the names of the claim, each expert's by itself."""

    streams = False

    def __init__(self, plain: Plain, dtype: torch.dtype = torch.float32) -> None:
        """`ConfigError` for models whose layers read what others made."""
        super().__init__(plain, dtype)
        spec = self.spec
        if any(map(self.reads, range(spec.layers))):
            raise ConfigError(
                f"{self.name}: layers read what an encoder or other layers made; such models do not train"
            )
        self.seen = Seen(self.opened.source)
        self.opened = replace(self.opened, source=self.seen)
        self._ends: tuple[int, Decoder, Decoder] | None = None

    @classmethod
    def of(cls, model: str) -> SeenNet:
        """The net of a folder, GGUF file or hub name, in f32."""
        return cls(as_plain(open_model(model)))

    def run(
        self,
        tokens: Tensor,
        rows: Tensor,
        lengths: Tensor | None = None,
        checkpointing: bool = False,
        wanted: Collection[int] = (),
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """tokens int [B, L] -> logits f32 [N, V] of the places `rows` bool [B * L], and the stream f32 [N, h] there
        past each of the layers `wanted`. `lengths`: as of `enter`.

        `checkpointing`: a layer is made and run anew for its gradients (Chen et al. 2016), so what is kept of it is the
        stream alone, and the dense weights of one layer are there at a time.
        """
        first, last = self._around()
        x, hidden = self.enter(tokens, first, lengths), dict[int, Tensor]()
        delta: Tensor | None = None
        for i in range(self.spec.layers):
            if checkpointing:
                x, delta = checkpoint(self.run_layer, i, x, delta, None, lengths, use_reentrant=False)
            else:
                x, delta = self.run_layer(i, x, delta, None, lengths)
            if i in wanted:
                hidden[i] = (x + delta).flatten(0, 1)[rows]
        assert delta is not None
        x, delta = (t.flatten(0, 1)[rows][None] for t in (x, delta))
        return self.leave(x, delta, last)[0], hidden

    def _around(self) -> tuple[Decoder | None, Decoder | None]:
        """What is before and after the layers, made once where no step changes it: tables of tokens are large."""
        names = [
            name for (_, place), p in self.opened.claim.parts.items() if place.layer is None for name in p.values()
        ]
        if any(self.tensors.was_set(self.rewritten.origins[name]) for name in names):
            return None, None
        if self._ends is None or self._ends[0] != len(self.seen.values):
            with torch.enable_grad():
                if any(self.seen.tensor(name).requires_grad for name in names):
                    return None, None
            self._ends = len(self.seen.values), self.before_layers(), self.after_layers()
        return self._ends[1:]


@dataclass(frozen=True)
class Matrix:
    """A matrix of a checkpoint. `name`: of its tensor; `module`: of what holds it, as PEFT knows it.

    `layer`: None for the output head. `transposed`: it lies as [k, n].
    """

    role: str
    layer: int | None
    expert: int | None
    name: str
    module: str
    transposed: bool


def matrices(opened: ModelHeaders) -> list[Matrix]:
    """The matrices that formats of fewer bits are for, the output head last if it is one of its own."""
    found = []
    for (role, place), parts in opened.claim.parts.items():
        about = DISK_ROLES[role]
        if about.kind != "linear" or about.wide or "weight" not in parts or (place.layer is None and role != "head"):
            continue
        module = "" if place.expert is not None else module_of(opened, role, place.layer)
        transposed = opened.family.transposed and place.layer is not None
        found.append(Matrix(role, place.layer, place.expert, parts["weight"], module, transposed))
    return sorted(found, key=lambda m: m.layer is None)
