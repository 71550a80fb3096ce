"""What each method of a recipe does: a row of the table, a function of a context and its stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.compress.changed import Layers, own_dtype, write_dense, write_laid
from quire.compress.context import Context
from quire.compress.layerwise import Change, change_layers
from quire.compress.layouts.registry import LAYOUTS
from quire.compress.net import Net
from quire.compress.prune.patterns import Pattern, apply_mask, ratio_mask
from quire.compress.prune.scores import magnitude, wanda
from quire.compress.prune.sparsegpt import sparsegpt
from quire.compress.quantize.gptq import gptq
from quire.compress.quantize.grid import Integers
from quire.compress.quantize.rtn import rtn
from quire.compress.stages import Gptq, Prune, Rtn, SparseGpt, Stage
from quire.compress.stats import Inputs
from quire.compress.structure import take_out
from quire.ops.weights import Weight

Run = Callable[[Context, Any], None]
USUAL = {"rtn": "compressed-tensors", "gptq": "gptq", "awq": "awq"}
"""The layout that files of a method usually have."""


def over_layers(context: Context, stage: Stage, change: Change) -> tuple[Net, Layers]:
    """Change all layers of the context's model."""
    net = Net.open(context.model)
    rows = context.rows().tokens if change.wants else ()
    change_layers(net, (context.number, stage), change, rows, context.work, context.tell, context.spill)
    return net, Layers(net, context, stage)


def quantized(context: Context, stage: Stage, change: Change) -> None:
    """Change all layers and write them in a layout; rounded and dense where another stage follows."""
    net, layers = over_layers(context, stage, change)
    asked = context.recipe.output.layout
    layout = USUAL[stage.method] if asked == "auto" else asked
    if context.last and layout != "dense":
        write_laid(context, net, layers, LAYOUTS[layout], own_dtype(net))
    else:
        write_dense(context, net, layers, torch.float32)


def round_nearest(context: Context, stage: Rtn) -> None:
    """Round-to-nearest."""
    grid = Integers(stage.bits, stage.symmetric)
    quantized(context, stage, Change(lambda w, seen, name: rtn(w, grid, stage.group_size)))


def round_gptq(context: Context, stage: Gptq) -> None:
    """GPTQ."""
    grid = Integers(stage.bits, stage.symmetric)

    def change(w: Tensor, seen: Inputs | None, name: str) -> Weight:
        assert seen is not None
        return gptq(
            w, seen.hessian, grid, stage.group_size, act_order=stage.act_order, static_groups=stage.static_groups,
            damping=stage.damping,
        )  # fmt: skip

    quantized(context, stage, Change(change, ("hessian",)))


def pruned(context: Context, stage: Stage, change: Change) -> None:
    """Change all layers and write them as plain numbers, in the model's own dtype at the end of a recipe."""
    net, layers = over_layers(context, stage, change)
    write_dense(context, net, layers, own_dtype(net))


def masked(scores: Tensor, stage: Prune) -> Tensor:
    """Which weights stay, by scores [n, k]."""
    return Pattern.parse(stage.pattern).mask(scores) if stage.pattern else ratio_mask(scores, stage.sparsity)


def prune_smallest(context: Context, stage: Prune) -> None:
    """Magnitude pruning."""
    pruned(context, stage, Change(lambda w, seen, name: Weight("f32", apply_mask(w, masked(magnitude(w), stage)))))


def prune_wanda(context: Context, stage: Prune) -> None:
    """Wanda."""

    def change(w: Tensor, seen: Inputs | None, name: str) -> Weight:
        assert seen is not None
        return Weight("f32", apply_mask(w, masked(wanda(w, seen.norms), stage)))

    pruned(context, stage, Change(change, ("norms",)))


def prune_sparsegpt(context: Context, stage: SparseGpt) -> None:
    """SparseGPT."""
    target = Pattern.parse(stage.pattern) if stage.pattern else stage.sparsity

    def change(w: Tensor, seen: Inputs | None, name: str) -> Weight:
        assert seen is not None
        return Weight("f32", sparsegpt(w, seen.hessian, target, damping=stage.damping)[0])

    pruned(context, stage, Change(change, ("hessian",)))


WORKS: dict[tuple[str, str], Run] = {
    ("quantize", "rtn"): round_nearest,
    ("quantize", "gptq"): round_gptq,
    ("prune", "magnitude"): prune_smallest,
    ("prune", "wanda"): prune_wanda,
    ("prune", "sparsegpt"): prune_sparsegpt,
    ("prune", "structured"): take_out,
}
"""(kind, method) of a stage -> what runs it."""
