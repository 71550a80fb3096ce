"""Runners of the methods of a recipe: a row of the table, a function of a context and its stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.compress.calibration.statistics import InputStatistics
from quire.compress.checkpoint.linear_weights import LinearWeight
from quire.compress.checkpoint.net import Net, checkpoint_dtype
from quire.compress.checkpoint.writer import atomic_folder
from quire.compress.layouts.base import Layout
from quire.compress.layouts.bitsandbytes import BitsAndBytesLayout
from quire.compress.layouts.compressed_tensors import CompressedTensorsLayout
from quire.compress.layouts.gguf import write_gguf
from quire.compress.layouts.gguf_assistants import open_source
from quire.compress.layouts.registry import LAYOUTS
from quire.compress.pipelines.layerwise import (
    InputObservations,
    LayerModifier,
    ModifiedLayer,
    modify_layers,
    per_matrix,
    per_shared_input,
)
from quire.compress.pipelines.mixed_precision import mixed_precision_modifier
from quire.compress.pipelines.smoothing import awq_modifier, smoothquant_modifier
from quire.compress.pipelines.stage_io import ModifiedLayers, StageContext, write_dense, write_packed
from quire.compress.pipelines.structured_pruning import run_structured
from quire.compress.pipelines.training import run_merge, run_training
from quire.compress.prune.masks import Pattern, apply_mask, ratio_mask
from quire.compress.prune.scores import magnitude, wanda
from quire.compress.prune.sparsegpt import sparsegpt
from quire.compress.quantize.fp4 import NF4_GRID, mxfp4
from quire.compress.quantize.fp8 import activation_scale, per_block, per_row, per_tensor
from quire.compress.quantize.gptq import gptq_all
from quire.compress.quantize.int8 import llm_int8
from quire.compress.quantize.kv_cache import KV_CACHE_FORMATS
from quire.compress.quantize.rounding import IntegerGrid, rtn
from quire.compress.recipes.stages import (
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
from quire.core.errors import ConfigError
from quire.model.mixers.layer_mixers import scaled
from quire.ops.weights import Weight

Runner = Callable[[StageContext, Any], None]
COMPRESSED = CompressedTensorsLayout()
NO_COLUMNS = torch.empty(0, dtype=torch.int64)


def modify_all_layers(context: StageContext, stage: Stage, change: LayerModifier) -> tuple[Net, ModifiedLayers]:
    """Change all layers of the context's model."""
    assert stage.by_layer or not change.reads, "what runs text through layers is checked before any work"
    net = Net.open(context.model)
    if change.kv_cache and not scaled(net.spec):
        raise ConfigError(
            f"kv: {net.name} caches latents, and layouts have scales of keys and values alone", param="kv"
        )
    rows = context.rows().tokens if change.reads else ()
    modify_layers(net, (context.number, stage), change, rows, context.work, context.report, context.spill)
    return net, ModifiedLayers(net, context, stage)


def write_quantized(context: StageContext, stage: Stage, change: LayerModifier, usual: Layout) -> None:
    """Change all layers and write them in a layout; rounded and dense where another stage follows.

    `usual`: the layout of such numbers where the recipe names none.
    """
    asked, kv = context.recipe.output.layout, getattr(stage, "kv", "none")
    named = usual if asked in ("auto", usual.name) else LAYOUTS.get(asked)
    layout = named if context.last else None
    if kv != "none" and not isinstance(layout, CompressedTensorsLayout):
        raise ConfigError(
            f"kv = {kv}: only the last stage in output.layout = compressed-tensors can say so", param="kv"
        )
    net, layers = modify_all_layers(context, stage, replace(change, kv_cache=kv != "none"))
    if layout is not None:
        if isinstance(layout, BitsAndBytesLayout):
            layout = replace(layout, dtype=str(checkpoint_dtype(net)).removeprefix("torch."))
        if isinstance(layout, CompressedTensorsLayout):
            layout = replace(layout, input_scales=layers.with_suffix(".input_scale"))
            if kv != "none":
                layout = replace(layout, cache=KV_CACHE_FORMATS[kv].scheme)
                layers.tensors |= layers.cache_scales(layout, KV_CACHE_FORMATS[kv].dtype)
        write_packed(context, net, layers, layout, checkpoint_dtype(net))
    else:
        write_dense(context, net, layers, torch.float32)


def run_rtn(context: StageContext, stage: Rtn) -> None:
    """Quantize by round-to-nearest."""
    grid = IntegerGrid(stage.bits, stage.symmetric)
    write_quantized(
        context, stage, LayerModifier(per_matrix(lambda w, observed: rtn(w, grid, stage.group_size))), COMPRESSED
    )


def run_gptq(context: StageContext, stage: Gptq) -> None:
    """Quantize by GPTQ."""
    grid = IntegerGrid(stage.bits, stage.symmetric)

    def change(ws: Iterator[Tensor], observed: InputStatistics) -> Iterator[Weight]:
        return gptq_all(
            ws, observed, grid, stage.group_size, act_order=stage.act_order, static_groups=stage.static_groups,
            damping=stage.damping,
        )  # fmt: skip

    write_quantized(context, stage, LayerModifier(per_shared_input(change), ("hessian",)), LAYOUTS["gptq"])


def run_awq(context: StageContext, stage: Awq) -> None:
    """Quantize by AWQ."""
    write_quantized(context, stage, awq_modifier(stage.bits, stage.group_size, stage.symmetric), LAYOUTS["awq"])


def run_smoothquant(context: StageContext, stage: SmoothQuant) -> None:
    """Quantize by SmoothQuant."""
    write_quantized(context, stage, smoothquant_modifier(stage.alpha), COMPRESSED)


def run_llm_int8(context: StageContext, stage: LlmInt8) -> None:
    """Quantize for LLM.int8(): the file has all columns in 8 bits, and the threshold.

    Who serves it finds outliers as they come.
    """
    change = LayerModifier(per_matrix(lambda w, observed: llm_int8(w, NO_COLUMNS).weight))
    write_quantized(context, stage, change, BitsAndBytesLayout(threshold=stage.threshold))


def run_fp8(context: StageContext, stage: Fp8) -> None:
    """Quantize to FP8; static scales of activations are those of the calibration text."""
    if stage.scales != "static":
        made = per_row if stage.scales == "dynamic" else per_block
        write_quantized(context, stage, LayerModifier(per_matrix(lambda w, observed: made(w))), COMPRESSED)
        return

    def modify(net: Net, layer: int, found: Sequence[LinearWeight], observed: InputObservations) -> ModifiedLayer:
        marks = {}
        for matrix in found:
            peak = observed[matrix.input_role, matrix.place.expert].inputs.peak
            marks[f"{matrix.base}.input_scale"] = activation_scale(peak).view(1)
        return {m.base: per_tensor(m.read(net)) for m in found}, marks

    write_quantized(context, stage, LayerModifier(modify, ("peak",)), COMPRESSED)


def run_nf4(context: StageContext, stage: Nf4) -> None:
    """Quantize to NF4; whether scales are quantized too is decided by the layout."""
    change = LayerModifier(per_matrix(lambda w, observed: rtn(w, NF4_GRID, stage.block_size)))
    write_quantized(context, stage, change, BitsAndBytesLayout(double=stage.double_quantization))


def run_mxfp4(context: StageContext, stage: Mxfp4) -> None:
    """Quantize to MXFP4."""
    write_quantized(context, stage, LayerModifier(per_matrix(lambda w, observed: mxfp4(w))), COMPRESSED)


def run_mixed(context: StageContext, stage: Mixed) -> None:
    """Quantize each layer to the bits that its sensitivity gives it."""
    write_quantized(context, stage, mixed_precision_modifier(context, stage), COMPRESSED)


def run_gguf(context: StageContext, stage: Gguf) -> None:
    """Write a GGUF file, which is the result: no stage reads it as it is."""
    opened = open_source(context.model)
    name = open_source(context.teacher).name
    with atomic_folder(context.target) as folder:
        path = folder / f"{name.rpartition('/')[2]}-{stage.format}.gguf"
        imatrix = Path(stage.imatrix).expanduser() if stage.imatrix else None
        most = round(stage.split_gb * 1e9)
        write_gguf(opened.folder, path, stage.format, name=name, imatrix=imatrix, most=most)
    for _ in range(opened.spec.layers):
        context.report("writing")


def write_pruned(context: StageContext, stage: Stage, change: LayerModifier) -> None:
    """Change all layers and write them as plain numbers, in the model's own dtype at the end of a recipe."""
    net, layers = modify_all_layers(context, stage, change)
    write_dense(context, net, layers, checkpoint_dtype(net))


def keep_mask(scores: Tensor, stage: Prune) -> Tensor:
    """Return which weights stay, by scores [n, k]."""
    return Pattern.parse(stage.pattern).mask(scores) if stage.pattern else ratio_mask(scores, stage.sparsity)


def run_magnitude(context: StageContext, stage: Prune) -> None:
    """Prune the weights of smallest magnitude."""
    change = per_matrix(lambda w, observed: Weight("f32", apply_mask(w, keep_mask(magnitude(w), stage))))
    write_pruned(context, stage, LayerModifier(change))


def run_wanda(context: StageContext, stage: Prune) -> None:
    """Prune by Wanda.

    A layer is observed once, before any of it is pruned, as the paper has it: observed again after each matrix, KL to
    the embedded model was 0.792 in place of 0.771 (2:4).
    """

    def change(w: Tensor, observed: InputStatistics | None) -> Weight:
        assert observed is not None
        return Weight("f32", apply_mask(w, keep_mask(wanda(w, observed.norms), stage)))

    write_pruned(context, stage, LayerModifier(per_matrix(change), ("norms",), sequential=False))


def run_sparsegpt(context: StageContext, stage: SparseGpt) -> None:
    """Prune by SparseGPT.

    A layer is observed once, as the paper has it: observed again after each matrix, KL to the embedded model was 0.432
    in place of 0.426 (2:4).
    """
    target = Pattern.parse(stage.pattern) if stage.pattern else stage.sparsity

    def change(w: Tensor, observed: InputStatistics | None) -> Weight:
        assert observed is not None
        return Weight("f32", sparsegpt(w, observed.hessian, target, damping=stage.damping)[0])

    write_pruned(context, stage, LayerModifier(per_matrix(change), ("hessian",), sequential=False))


RUNNERS: dict[tuple[str, str], Runner] = {
    ("quantize", "rtn"): run_rtn,
    ("quantize", "gptq"): run_gptq,
    ("quantize", "awq"): run_awq,
    ("quantize", "smoothquant"): run_smoothquant,
    ("quantize", "llm_int8"): run_llm_int8,
    ("quantize", "fp8"): run_fp8,
    ("quantize", "nf4"): run_nf4,
    ("quantize", "mxfp4"): run_mxfp4,
    ("quantize", "mixed"): run_mixed,
    ("quantize", "gguf"): run_gguf,
    ("prune", "magnitude"): run_magnitude,
    ("prune", "wanda"): run_wanda,
    ("prune", "sparsegpt"): run_sparsegpt,
    ("prune", "structured"): run_structured,
    **{("distil", method): run_training for method in ("logits", "hidden", "text")},
    **{("train", method): run_training for method in ("full", "lora", "qlora", "qat")},
    **{("recover", method): run_training for method in ("full", "lora")},
    ("merge", "lora"): run_merge,
}
"""(kind, method) of a stage -> what runs it."""
