"""What a role is: a matrix or vector that a checkpoint holds, and how ranks share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from quire.model.spec import ModelSpec

ROWS, COLUMNS, WHOLE = "rows", "columns", "whole"
"""Axes that tensor parallelism splits (Megatron-LM, Shoeybi et al. 2019): the outputs of a row shard are a slice of the
whole's, those of column shards are partial sums, which one reduction adds."""
EVEN, SHARED, FIRST, STEPS = "even", "shared", "first", "steps"
"""Every rank has as many units; the same, and fewer units than ranks are replicated; the first ranks have as many, the
last what is left; as many as can be, in steps that stay whole."""


@dataclass(frozen=True)
class Role:
    """`shape(spec)`: [n, k] of a matrix, [n] of a vector. `units(spec)`: pieces of the split axis that stay whole.

    `kind`: "linear" (in the checkpoint's weight format, may have a bias), "dense" (a small matrix kept as f32 whatever
    the format), "table" (rows looked up, never quantized) or "vector". `layer`: there is one per layer, of the encoder
    if it is `encoder`, or `experts`: per layer and expert, in the layers `where` says. `wide`: never quantized at load.
    `optional`: some families lack it, but who has it has its `partner` too. `spread`: how units are, over ranks.
    `biased`: a vector that may have a bias beside it. `integers`: a table of whole numbers.
    """

    kind: str
    shape: Callable[[ModelSpec], tuple[int, ...]]
    shard: str = WHOLE
    units: Callable[[ModelSpec], int] = lambda s: 1
    layer: bool = True
    optional: bool = False
    partner: str = ""
    wide: bool = False
    where: Callable[[ModelSpec, int], bool] = lambda s, layer: True
    experts: bool = False
    encoder: bool = False
    spread: str = EVEN
    biased: bool = False
    integers: bool = False

    def layers(self, spec: ModelSpec) -> Sequence[int]:
        """The layers of the stack it belongs to, those with weights of their own."""
        return range(spec.encoder.layers) if self.encoder else spec.weighted_layers

    def numbers(self, spec: ModelSpec) -> int:
        """Numbers of all of it that a model has."""
        if not self.layer or self.encoder or not spec.sizes:
            return prod(self.shape(spec)) * self.copies(spec)
        held = sum(prod(self.shape(spec.at(i))) for i in self.layers(spec) if self.where(spec, i))
        return held * (spec.moe.routing.experts if self.experts else 1)

    def copies(self, spec: ModelSpec) -> int:
        """How many of it a model has."""
        layers = sum(self.where(spec, i) for i in self.layers(spec)) if self.layer else 1
        return layers * (spec.moe.routing.experts if self.experts else 1)
