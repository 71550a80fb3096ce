"""What each method of a recipe does: a row of the table, a function of a context and its stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.compress.changed import Layers, own_dtype, write_dense, write_laid
from quire.compress.context import Context
from quire.compress.layerwise import Change, Key, Made, Seen, change_layers, each, together
from quire.compress.layouts.base import Layout
from quire.compress.layouts.bitsandbytes import BitsAndBytes
from quire.compress.layouts.compressed import CompressedTensors
from quire.compress.layouts.gguf import write_gguf
from quire.compress.layouts.registry import LAYOUTS
from quire.compress.learned import learn, merge
from quire.compress.matrices import Matrix
from quire.compress.mixed_bits import changes_of
from quire.compress.net import Net
from quire.compress.prune.patterns import Pattern, apply_mask, ratio_mask
from quire.compress.prune.scores import magnitude, wanda
from quire.compress.prune.sparsegpt import sparsegpt
from quire.compress.quantize import mxfp4, nf4
from quire.compress.quantize.fp8 import activation_scale, in_blocks, per_row, per_tensor
from quire.compress.quantize.gptq import gptq_all
from quire.compress.quantize.grid import Integers
from quire.compress.quantize.kv_scales import CACHES
from quire.compress.quantize.outliers import llm_int8
from quire.compress.quantize.rtn import rtn
from quire.compress.scaled import with_awq, with_smoothquant
from quire.compress.stages import (
    Awq,
    Fp8,
    Gguf,
    Gptq,
    LlmInt8,
    Mixed,
    Mxfp4,
    Nf4,
    Prune,
    Rtn,
    SmoothQuant,
    SparseGpt,
    Stage,
)
from quire.compress.stats import Inputs
from quire.compress.structure import take_out
from quire.compress.write import whole_folder
from quire.core.errors import ConfigError
from quire.model.describe import open_model
from quire.model.mixers.table import scaled
from quire.ops.weights import Weight

Run = Callable[[Context, Any], None]
COMPRESSED = CompressedTensors()
NO_COLUMNS = torch.empty(0, dtype=torch.int64)


def over_layers(context: Context, stage: Stage, change: Change) -> tuple[Net, Layers]:
    """Change all layers of the context's model."""
    assert stage.by_layer or not change.reads, "what runs text through layers is checked before any work"
    net = Net.open(context.model)
    if change.cache and not scaled(net.spec):
        raise ConfigError(
            f"kv: {net.name} caches latents, and layouts have scales of keys and values alone", param="kv"
        )
    rows = context.rows().tokens if change.reads else ()
    change_layers(net, (context.number, stage), change, rows, context.work, context.tell, context.spill)
    return net, Layers(net, context, stage)


def quantized(context: Context, stage: Stage, change: Change, usual: Layout) -> None:
    """Change all layers and write them in a layout; rounded and dense where another stage follows.

    `usual`: the layout of such numbers where the recipe names none.
    """
    asked, kv = context.recipe.output.layout, getattr(stage, "kv", "none")
    named = usual if asked in ("auto", usual.name) else LAYOUTS.get(asked)
    layout = named if context.last else None
    if kv != "none" and not isinstance(layout, CompressedTensors):
        raise ConfigError(
            f"kv = {kv}: only the last stage in output.layout = compressed-tensors can say so", param="kv"
        )
    net, layers = over_layers(context, stage, replace(change, cache=kv != "none"))
    if layout is not None:
        if isinstance(layout, BitsAndBytes):
            layout = replace(layout, dtype=str(own_dtype(net)).removeprefix("torch."))
        if isinstance(layout, CompressedTensors):
            layout = replace(layout, input_scales=layers.with_suffix(".input_scale"))
            if kv != "none":
                layout = replace(layout, cache=CACHES[kv].scheme)
                layers.tensors |= layers.cache_scales(layout, CACHES[kv].dtype)
        write_laid(context, net, layers, layout, own_dtype(net))
    else:
        write_dense(context, net, layers, torch.float32)


def round_nearest(context: Context, stage: Rtn) -> None:
    """Round-to-nearest."""
    grid = Integers(stage.bits, stage.symmetric)
    quantized(context, stage, Change(each(lambda w, seen: rtn(w, grid, stage.group_size))), COMPRESSED)


def round_gptq(context: Context, stage: Gptq) -> None:
    """GPTQ."""
    grid = Integers(stage.bits, stage.symmetric)

    def change(ws: Iterator[Tensor], seen: Inputs) -> Iterator[Weight]:
        return gptq_all(
            ws, seen, grid, stage.group_size, act_order=stage.act_order, static_groups=stage.static_groups,
            damping=stage.damping,
        )  # fmt: skip

    quantized(context, stage, Change(together(change), ("hessian",)), LAYOUTS["gptq"])


def round_awq(context: Context, stage: Awq) -> None:
    """AWQ."""
    quantized(context, stage, with_awq(stage.bits, stage.group_size, stage.symmetric), LAYOUTS["awq"])


def smooth(context: Context, stage: SmoothQuant) -> None:
    """SmoothQuant."""
    quantized(context, stage, with_smoothquant(stage.alpha), COMPRESSED)


def round_int8(context: Context, stage: LlmInt8) -> None:
    """LLM.int8(): the file has all columns in 8 bits, and the threshold; who serves it finds outliers as they come."""
    change = Change(each(lambda w, seen: llm_int8(w, NO_COLUMNS).weight))
    quantized(context, stage, change, BitsAndBytes(threshold=stage.threshold))


def round_fp8(context: Context, stage: Fp8) -> None:
    """FP8; static scales of activations are those of the calibration text."""
    if stage.scales != "static":
        made = per_row if stage.scales == "dynamic" else in_blocks
        quantized(context, stage, Change(each(lambda w, seen: made(w))), COMPRESSED)
        return

    def of(net: Net, layer: int, found: Sequence[Matrix], seen: Mapping[Key, Seen]) -> Made:
        marks = {}
        for matrix in found:
            peak = seen[matrix.observed, matrix.place.expert].inputs.peak
            marks[f"{matrix.base}.input_scale"] = activation_scale(peak).view(1)
        return {m.base: per_tensor(m.of(net)) for m in found}, marks

    quantized(context, stage, Change(of, ("peak",)), COMPRESSED)


def round_nf4(context: Context, stage: Nf4) -> None:
    """NF4; that scales are rounded too is the layout's affair."""
    change = Change(each(lambda w, seen: rtn(w, nf4.GRID, stage.block_size)))
    quantized(context, stage, change, BitsAndBytes(double=stage.double_quantization))


def round_mxfp4(context: Context, stage: Mxfp4) -> None:
    """MXFP4."""
    quantized(context, stage, Change(each(lambda w, seen: mxfp4.mxfp4(w))), COMPRESSED)


def round_mixed(context: Context, stage: Mixed) -> None:
    """Bits by layer."""
    quantized(context, stage, changes_of(context, stage), COMPRESSED)


def write_as_gguf(context: Context, stage: Gguf) -> None:
    """A GGUF file, which is the result: no stage reads it as it is."""
    opened = open_model(context.model)
    name = open_model(context.teacher).name
    with whole_folder(context.target) as folder:
        write_gguf(opened.folder, folder / f"{name.rpartition('/')[2]}-{stage.format}.gguf", stage.format, name=name)
    for _ in range(opened.spec.layers):
        context.tell("writing")


def pruned(context: Context, stage: Stage, change: Change) -> None:
    """Change all layers and write them as plain numbers, in the model's own dtype at the end of a recipe."""
    net, layers = over_layers(context, stage, change)
    write_dense(context, net, layers, own_dtype(net))


def masked(scores: Tensor, stage: Prune) -> Tensor:
    """Which weights stay, by scores [n, k]."""
    return Pattern.parse(stage.pattern).mask(scores) if stage.pattern else ratio_mask(scores, stage.sparsity)


def prune_smallest(context: Context, stage: Prune) -> None:
    """Magnitude pruning."""
    change = each(lambda w, seen: Weight("f32", apply_mask(w, masked(magnitude(w), stage))))
    pruned(context, stage, Change(change))


def prune_wanda(context: Context, stage: Prune) -> None:
    """Wanda. A layer is looked at once, before any of it is pruned, as the paper has it: looked at again after each
    matrix, KL to the embedded model was 0.792 in place of 0.771 (2:4)."""

    def change(w: Tensor, seen: Inputs | None) -> Weight:
        assert seen is not None
        return Weight("f32", apply_mask(w, masked(wanda(w, seen.norms), stage)))

    pruned(context, stage, Change(each(change), ("norms",), in_turn=False))


def prune_sparsegpt(context: Context, stage: SparseGpt) -> None:
    """SparseGPT, as the paper has it: a layer is looked at once. Looked at again after each matrix, KL to the embedded
    model was 0.432 in place of 0.426 (2:4)."""
    target = Pattern.parse(stage.pattern) if stage.pattern else stage.sparsity

    def change(w: Tensor, seen: Inputs | None) -> Weight:
        assert seen is not None
        return Weight("f32", sparsegpt(w, seen.hessian, target, damping=stage.damping)[0])

    pruned(context, stage, Change(each(change), ("hessian",), in_turn=False))


WORKS: dict[tuple[str, str], Run] = {
    ("quantize", "rtn"): round_nearest,
    ("quantize", "gptq"): round_gptq,
    ("quantize", "awq"): round_awq,
    ("quantize", "smoothquant"): smooth,
    ("quantize", "llm_int8"): round_int8,
    ("quantize", "fp8"): round_fp8,
    ("quantize", "nf4"): round_nf4,
    ("quantize", "mxfp4"): round_mxfp4,
    ("quantize", "mixed"): round_mixed,
    ("quantize", "gguf"): write_as_gguf,
    ("prune", "magnitude"): prune_smallest,
    ("prune", "wanda"): prune_wanda,
    ("prune", "sparsegpt"): prune_sparsegpt,
    ("prune", "structured"): take_out,
    **{("distil", method): learn for method in ("logits", "hidden", "text")},
    **{("train", method): learn for method in ("full", "lora", "qlora", "qat")},
    **{("recover", method): learn for method in ("full", "lora")},
    ("merge", "lora"): merge,
}
"""(kind, method) of a stage -> what runs it."""
