"""Fine-tuning of all tensors or some, in which what was pruned stays pruned (as in Han et al. 2015)."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from torch import Tensor

from quire.compress.train.seen import ParametrizedNet, linear_modules
from quire.core.errors import ConfigError

PRUNED = 0.1
"""Share of zeros from which a matrix counts as pruned: plain ones have next to none, pruned ones a third at least."""


class PruningMasks:
    """Zeros of the matrices of layers that were pruned stay zeros. Add `value` to the values of a `ParametrizedNet`.

    Their gradients are zero, so Adam's moments are, and the weight's decay of zero is zero: they stay so to the bit.
    `masks`: name of a matrix -> where it is not zero, bool.
    """

    def __init__(self, net: ParametrizedNet) -> None:
        self.masks: dict[str, Tensor] = {}
        for matrix in linear_modules(net.opened):
            mask = net.opened.source.tensor(matrix.name) != 0
            if mask.numel() - int(mask.sum()) >= PRUNED * mask.numel():
                self.masks[matrix.name] = mask

    def value(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor with zeros where it had some."""
        mask = self.masks.get(name)
        return tensor if mask is None else tensor * mask


def trainable_tensors(net: ParametrizedNet, targets: Sequence[str]) -> dict[str, Tensor]:
    """The floating-point tensors whose name on disk one of the globs matches (none given: all), as leaves.

    `ConfigError` for a glob that matches none.
    """
    names = [n for n in net.tensors if net.tensors.is_floating_point(n)]
    for target in targets:
        if not any(fnmatch.fnmatch(name, target) for name in names):
            raise ConfigError(f"--targets {target!r} matches no tensor of {net.name}, as {names[0]}", param="targets")
    wanted = [n for n in names if not targets or any(fnmatch.fnmatch(n, target) for target in targets)]
    return net.require_grad(wanted)
