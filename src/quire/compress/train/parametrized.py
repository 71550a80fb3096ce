"""A net whose tensors pass through parametrizations, as training methods need it.

A parametrization is a function of a tensor's name and numbers, applied where the reader reads them: low-rank changes,
fake quantization, pruning masks. So methods compose as functions do, and every family has them all.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from quire.compress.checkpoint.dequantized import PlainCheckpoint, as_plain_checkpoint
from quire.compress.checkpoint.net import Net
from quire.core.errors import ConfigError
from quire.model.describe import open_model
from quire.model.disk.checkpoint import TensorSource
from quire.model.disk.headers import ModelHeaders
from quire.model.load.adapter_files import module_of
from quire.model.load.roles import DISK_ROLES
from quire.model.net.decoder import Decoder
from quire.ops.arrays import to_torch

Parametrization = Callable[[str, Tensor], Tensor]
"""(name of a tensor, its numbers) -> what the decoder is made of instead, of the same shape."""


class QuantizedTensor(Protocol):
    """A tensor stored in fewer bits."""

    def dequantize(self) -> Tensor:
        """Return the tensor, f32."""
        ...


class ParametrizedSource:
    """A `TensorSource` through `parametrizations`, one after the other; `frozen`: tensors that are stored as codes."""

    def __init__(self, source: TensorSource) -> None:
        self._source, self.infos = source, source.infos
        self.parametrizations: list[Parametrization] = []
        self.frozen: dict[str, QuantizedTensor] = {}

    def tensor(self, name: str) -> Tensor:
        """Return the tensor `name` as the parametrizations make it."""
        tensor = self.frozen[name].dequantize() if name in self.frozen else to_torch(self._source.tensor(name))
        for value in self.parametrizations:
            tensor = value(name, tensor)
        return tensor

    def read_ahead(self, names: Iterable[str]) -> None:
        """Ask the system to read those of `names` that are not stored as codes."""
        self._source.read_ahead([name for name in names if name not in self.frozen])

    def give_back(self) -> None:
        """Give back the memory of the file's pages."""
        self._source.give_back()


class ParametrizedNet(Net):
    """A net whose tensors go through `parametrized.parametrizations`.

    They are called with the names that roles are claimed by, each expert's by itself.
    """

    streams = False

    def __init__(self, plain: PlainCheckpoint, dtype: torch.dtype = torch.float32) -> None:
        """Wrap a model. `ConfigError` where its layers read what others made."""
        super().__init__(plain, dtype)
        spec = self.spec
        if any(map(self.reads, range(spec.layers))):
            raise ConfigError(
                f"{self.name}: layers read what an encoder or other layers made; such models do not train"
            )
        self.parametrized = ParametrizedSource(self.opened.source)
        self.opened = replace(self.opened, source=self.parametrized)
        self._ends: tuple[int, Decoder, Decoder] | None = None

    @classmethod
    def of(cls, model: str) -> ParametrizedNet:
        """Open a folder, GGUF file or hub name, in f32."""
        return cls(as_plain_checkpoint(open_model(model)))

    def run(
        self,
        tokens: Tensor,
        rows: Tensor,
        lengths: Tensor | None = None,
        checkpointing: bool = False,
        wanted: Collection[int] = (),
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run tokens int [B, L]; returns logits f32 [N, V] of the places `rows` bool [B * L], and hidden states past
        layers.

        The hidden states f32 [N, h] are those of the same places past each of the layers `wanted`. `lengths`: as of
        `enter`. `checkpointing`: a layer is made and run anew for its gradients (Chen et al. 2016), so what is stored
        of it is the hidden states alone, and the dense weights of one layer are there at a time.
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
        """Build what is before and after the layers, once where no step changes it: embedding tables are large."""
        names = [
            name for (_, place), p in self.opened.claim.parts.items() if place.layer is None for name in p.values()
        ]
        if any(self.tensors.was_set(self.rewritten.origins[name]) for name in names):
            return None, None
        if self._ends is None or self._ends[0] != len(self.parametrized.parametrizations):
            with torch.enable_grad():
                if any(self.parametrized.tensor(name).requires_grad for name in names):
                    return None, None
            self._ends = len(self.parametrized.parametrizations), self.before_layers(), self.after_layers()
        return self._ends[1:]


@dataclass(frozen=True)
class LinearModule:
    """A linear module of a checkpoint. `name`: of its weight's tensor; `module`: of the module, as PEFT knows it.

    `layer`: None for the output head. `transposed`: the weight lies as [k, n].
    """

    role: str
    layer: int | None
    expert: int | None
    name: str
    module: str
    transposed: bool


def linear_modules(opened: ModelHeaders) -> list[LinearModule]:
    """List the modules that formats of fewer bits are for, the output head last if it is one of its own."""
    found = []
    for (role, place), parts in opened.claim.parts.items():
        about = DISK_ROLES[role]
        if about.kind != "linear" or about.wide or "weight" not in parts or (place.layer is None and role != "head"):
            continue
        module = "" if place.expert is not None else module_of(opened, role, place.layer)
        transposed = opened.family.transposed and place.layer is not None
        found.append(LinearModule(role, place.layer, place.expert, parts["weight"], module, transposed))
    return sorted(found, key=lambda m: m.layer is None)


PRUNED = 0.1
"""Share of zeros from which a matrix counts as pruned: plain ones have next to none, pruned ones a third at least."""


class PruningMasks:
    """A parametrization that keeps zeros of pruned matrices zero (as in Han et al. 2015).

    Add `value` to the parametrizations of a `ParametrizedNet`. Gradients of these weights are zero, so Adam's moments
    are, and the weight's decay of zero is zero: they stay so to the bit. `masks`: name of a matrix -> where it is not
    zero, bool.
    """

    def __init__(self, net: ParametrizedNet) -> None:
        self.masks: dict[str, Tensor] = {}
        for matrix in linear_modules(net.opened):
            mask = net.opened.source.tensor(matrix.name) != 0
            if mask.numel() - int(mask.sum()) >= PRUNED * mask.numel():
                self.masks[matrix.name] = mask

    def value(self, name: str, tensor: Tensor) -> Tensor:
        """Return the tensor with zeros where it had some."""
        mask = self.masks.get(name)
        return tensor if mask is None else tensor * mask


def trainable_tensors(net: ParametrizedNet, targets: Sequence[str]) -> dict[str, Tensor]:
    """Make leaves of the floating-point tensors whose name on disk one of the globs matches (none given: all).

    `ConfigError` for a glob that matches none.
    """
    names = [n for n in net.tensors if net.tensors.is_floating_point(n)]
    for target in targets:
        if not any(fnmatch.fnmatch(name, target) for name in names):
            raise ConfigError(f"--targets {target!r} matches no tensor of {net.name}, as {names[0]}", param="targets")
    wanted = [n for n in names if not targets or any(fnmatch.fnmatch(n, target) for target in targets)]
    return net.require_grad(wanted)
