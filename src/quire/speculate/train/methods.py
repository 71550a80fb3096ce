"""What can be trained: which rows of the target each method reads, and its heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from quire.model.net.hidden_taps import Taps
from quire.model.spec import ModelSpec
from quire.speculate.train.eagle3 import Eagle3Layer, frequent, taps_of
from quire.speculate.train.medusa import MedusaHeads
from quire.speculate.train.target import Target

Rows = list[list[int]]


@dataclass(frozen=True)
class Method:
    """`taps` of a target's spec; `heads(target, tokens to guess, rows of text)`."""

    taps: Callable[[ModelSpec], Taps]
    heads: Callable[[Target, int, Rows], nn.Module]


METHODS = {
    "eagle3": Method(
        taps_of, lambda target, count, rows: Eagle3Layer(target, count, frequent(rows, target.spec.vocab_size))
    ),
    "medusa": Method(lambda spec: MedusaHeads.taps, lambda target, count, rows: MedusaHeads(target, count)),
}
