"""Mixed precision by sensitivity: each layer gets the bits with which all cost least, at a mean of bits a weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quire.compress.calibration.statistics import InputStatistics
from quire.compress.checkpoint.linear_weights import LinearWeight, linear_weights
from quire.compress.checkpoint.net import Net
from quire.compress.pipelines.layerwise import (
    InputObservations,
    LayerModifier,
    ModifiedLayer,
    per_matrix,
    per_shared_input,
)
from quire.compress.pipelines.smoothing import awq_modifier
from quire.compress.pipelines.stage_io import StageContext
from quire.compress.quantize.bit_allocation import choose_formats
from quire.compress.quantize.gptq import gptq_all
from quire.compress.quantize.rounding import IntegerGrid, rtn
from quire.compress.recipes.stages import Mixed
from quire.ops.weights import Weight

ROWS = 8
"""Of calibration text on which layers' damage is measured: every layer and number of bits is a pass of the model."""
SENSITIVITY_UNIT = "sensitivity of layer {}"


def mixed_precision_modifier(context: StageContext, stage: Mixed) -> LayerModifier:
    """Make the modifier that rounds each layer to the bits that its sensitivity gives it."""
    net = Net.open(context.model)
    bits = choose_bits(net, context, stage)
    by_bits = {b: _rounding_modifier(stage, b) for b in set(bits.values())}
    first = next(iter(by_bits.values()))

    def modify(net: Net, layer: int, found: Sequence[LinearWeight], observed: InputObservations) -> ModifiedLayer:
        return by_bits[bits[layer]].modify(net, layer, found, observed)

    return LayerModifier(modify, first.statistics, first.sample, first.sequential)


def choose_bits(net: Net, context: StageContext, stage: Mixed) -> dict[int, int]:
    """Choose the bits of each layer."""
    options, total = dict[str, dict[str, tuple[int, float]]](), 0
    before: Tensor | None = None
    tokens = torch.tensor(context.rows().tokens[:ROWS])
    for layer in range(net.spec.layers):
        found = [m for m in linear_weights(net, layer) if stage.covers(m.base)]
        for matrix in found:
            matrix.check(net)
        numbers = sum(m.read(net).numel() for m in found)
        total += numbers
        unit = SENSITIVITY_UNIT.format(layer)
        if not context.work.done(context.number, unit):
            before = _log_probabilities(net, tokens) if before is None else before
            damage = {str(bits): _damage(net, found, bits, stage, tokens, before) for bits in stage.choices}
            context.work.save(context.number, unit, {}, damage)
        damage = context.work.facts(context.number, unit)
        options[str(layer)] = {str(b): (numbers * b // 8, damage[str(b)]) for b in stage.choices}
    found_bits = choose_formats(options, int(total * stage.bits_per_weight / 8))
    return {int(layer): int(bits) for layer, bits in found_bits.items()}


def _damage(net: Net, found: Sequence[LinearWeight], bits: int, stage: Mixed, tokens: Tensor, before: Tensor) -> float:
    """Measure KL(source || one layer rounded) in nats a token."""
    for matrix in found:
        matrix.assign(net, rtn(matrix.read(net), IntegerGrid(bits), stage.group_size).dequantize())
    after = _log_probabilities(net, tokens)
    for matrix in found:
        matrix.restore(net)
    lost = torch.nn.functional.kl_div(after, before, reduction="none", log_target=True).sum(-1)
    return max(0.0, float(lost.double().mean()))


def _log_probabilities(net: Net, tokens: Tensor) -> Tensor:
    """Compute log p [rows, L, V], a row after the other."""
    with torch.no_grad():
        return torch.cat([net.logits(row[None]).log_softmax(-1) for row in tokens])


def _rounding_modifier(stage: Mixed, bits: int) -> LayerModifier:
    grid, group = IntegerGrid(bits), stage.group_size
    if stage.rounding == "awq":
        return awq_modifier(bits, group, symmetric=True)
    if stage.rounding == "rtn":
        return LayerModifier(per_matrix(lambda w, observed: rtn(w, grid, group)))

    def change(ws: Iterator[Tensor], observed: InputStatistics) -> Iterator[Weight]:
        return gptq_all(ws, observed, grid, group)

    return LayerModifier(per_shared_input(change), ("hessian",))
