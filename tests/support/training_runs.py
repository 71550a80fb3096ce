"""Plans of training runs, and logits of what was trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.compress.train.parametrized import ParametrizedNet


@dataclass(frozen=True)
class Plan:
    """Of a test."""

    steps: int


def logits_of(net: ParametrizedNet, tokens: list[int]) -> Tensor:
    """Of every place."""
    return net.run(torch.tensor([tokens]), torch.ones(len(tokens), dtype=torch.bool))[0]
