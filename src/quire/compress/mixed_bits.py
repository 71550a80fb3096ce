"""Bits by sensitivity: each layer gets the bits with which all together cost least, within a mean of bits a weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from quire.compress.context import Context
from quire.compress.layerwise import Change, Key, Made, Seen, each, together
from quire.compress.matrices import Matrix, matrices
from quire.compress.net import Net
from quire.compress.quantize.gptq import gptq_all
from quire.compress.quantize.grid import Integers
from quire.compress.quantize.mixed import choose_formats
from quire.compress.quantize.rtn import rtn
from quire.compress.scaled import with_awq
from quire.compress.stages import Mixed
from quire.compress.stats import Inputs
from quire.ops.weights import Weight

ROWS = 8
"""Of calibration text on which layers' damage is measured: every layer and number of bits is a pass of the model."""
UNIT = "sensitivity of layer {}"


def changes_of(context: Context, stage: Mixed) -> Change:
    """What is done to each layer, by the bits that its sensitivity gives it."""
    net = Net.open(context.model)
    bits = chosen(net, context, stage)
    by_bits = {b: _rounding(stage, b) for b in set(bits.values())}
    first = next(iter(by_bits.values()))

    def of(net: Net, layer: int, found: Sequence[Matrix], seen: Mapping[Key, Seen]) -> Made:
        return by_bits[bits[layer]].of(net, layer, found, seen)

    return Change(of, first.wants, first.sample, first.in_turn)


def chosen(net: Net, context: Context, stage: Mixed) -> dict[int, int]:
    """The bits of each layer."""
    options, total = dict[str, dict[str, tuple[int, float]]](), 0
    before: Tensor | None = None
    tokens = torch.tensor(context.rows().tokens[:ROWS])
    for layer in range(net.spec.layers):
        found = [m for m in matrices(net, layer) if stage.covers(m.base)]
        for matrix in found:
            matrix.check(net)
        numbers = sum(m.of(net).numel() for m in found)
        total += numbers
        unit = UNIT.format(layer)
        if not context.work.done(context.number, unit):
            before = _logits(net, tokens) if before is None else before
            damage = {str(bits): _damage(net, found, bits, stage, tokens, before) for bits in stage.choices}
            context.work.keep(context.number, unit, {}, damage)
        damage = context.work.facts(context.number, unit)
        options[str(layer)] = {str(b): (numbers * b // 8, damage[str(b)]) for b in stage.choices}
    found_bits = choose_formats(options, int(total * stage.bits_per_weight / 8))
    return {int(layer): int(bits) for layer, bits in found_bits.items()}


def _damage(net: Net, found: Sequence[Matrix], bits: int, stage: Mixed, tokens: Tensor, before: Tensor) -> float:
    """KL(as it is || with one layer rounded) in nats a token."""
    for matrix in found:
        matrix.put(net, rtn(matrix.of(net), Integers(bits), stage.group_size).dequantize())
    after = _logits(net, tokens)
    for matrix in found:
        matrix.forget(net)
    lost = torch.nn.functional.kl_div(after, before, reduction="none", log_target=True).sum(-1)
    return max(0.0, float(lost.double().mean()))


def _logits(net: Net, tokens: Tensor) -> Tensor:
    """log p [rows, L, V], a row after the other."""
    with torch.no_grad():
        return torch.cat([net.logits(row[None]).log_softmax(-1) for row in tokens])


def _rounding(stage: Mixed, bits: int) -> Change:
    grid, group = Integers(bits), stage.group_size
    if stage.rounding == "awq":
        return with_awq(bits, group, symmetric=True)
    if stage.rounding == "rtn":
        return Change(each(lambda w, seen: rtn(w, grid, group)))

    def change(ws: Iterator[Tensor], seen: Inputs) -> Iterator[Weight]:
        return gptq_all(ws, seen, grid, group)

    return Change(together(change), ("hessian",))
