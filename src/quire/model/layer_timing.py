"""How long layers take, so that the stages of a pipeline take about the same time."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

import numpy as np
from msgspec.structs import replace

from quire.core.config import EngineConfig
from quire.core.dtypes import I32, Dtype
from quire.model.batch import Batch
from quire.model.build import form_of, kv_layouts
from quire.model.describe import compute_dtype, open_model
from quire.model.disk.checkpoint import resolve
from quire.model.disk.headers import ModelHeaders
from quire.model.families.rope import shared_tables
from quire.model.load.builders import BLOCKS, load_layer
from quire.model.load.pipeline_stages import Costs, numbers_of, stages_of
from quire.model.load.reader import WeightReader
from quire.model.load.roles import Share, local_spec
from quire.model.mixers.layer_mixers import mixer_of
from quire.model.transformers_backend.detect import is_borrowed
from quire.ops.arrays import Array, Host
from quire.ops.backend import Ops
from quire.ops.layout import LayerCache, with_states
from quire.ops.recurrent import StateBatch
from quire.quant.registry import quantizer
from quire.store.hub import hub_of

log = logging.getLogger(__name__)
PROMPT, ANSWERS = 128, 16
"""Rows of the steps that are timed: a chunk of a prompt, and a token of each of so many sequences."""
TURNS = 5


def with_stages(config: EngineConfig, ops: Ops) -> EngineConfig:
    """`config` with the layers of each stage, where it asks for stages and does not say which layers they have."""
    parallel, options = config.parallel, config.model
    if parallel.pipeline_parallel_size == 1 or parallel.pinned_layers or not ops.timed:
        return config
    if is_borrowed(resolve(options.model, hub_of(options))):
        return config  # refused when it is loaded
    opened = open_model(options.model, options.load_format, options.seed, hub_of(options))
    stages_of(parallel, opened.spec)
    stages = stages_of(parallel, opened.spec, measured(config, opened, ops))
    log.info("stages: layers %s", ", ".join(f"{part.start} to {part.stop - 1}" for part in stages))
    layers = ",".join(str(len(part)) for part in stages)
    return replace(config, parallel=replace(parallel, pipeline_layers=layers))


def measured(config: EngineConfig, opened: ModelHeaders, ops: Ops) -> Costs:
    """Seconds of each layer and of the head. Layers of one kind are timed once; the head by how many numbers it has."""
    spec, share = opened.spec, Share(0, config.parallel.tensor_parallel_size)
    dtype, _ = compute_dtype(config.model.dtype, opened.dtype)
    target = quantizer(config.model.quantization, opened.stored)
    reader = WeightReader(opened, ops, form_of(config, dtype, target), share, None)
    kinds: dict[tuple[object, ...], tuple[float, float]] = {}
    layers, head = [], 0.0
    for i in range(spec.layers):
        kind = spec.is_sparse(i), spec.attends(i), spec.windows[i] > 0, spec.kv_layer(i) == i, spec.sizes[i : i + 1]
        if kind not in kinds:
            kinds[kind] = _layer_seconds(config, reader, dtype, i)
            head = max(head, kinds[kind][1] * spec.vocab_size * spec.embed_width / numbers_of(spec, i))
        layers.append(sum(kinds[kind]))
    return layers, head


def _layer_seconds(config: EngineConfig, reader: WeightReader, dtype: Dtype, index: int) -> tuple[float, float]:
    """Seconds of one token: of a prompt, and of answers."""
    spec, ops, size = reader.opened.spec, reader.ops, config.cache.block_size
    (rope,) = shared_tables((spec.rope[index],), PROMPT).values()
    with reader.part(index):
        layer = reader.place(load_layer(reader, index, rope, None))
    parts = kv_layouts(config.cache, local_spec(spec, reader.share), dtype, ops)[index]
    cache: LayerCache = tuple(ops.allocate_cache(part, max(-(-PROMPT // size), ANSWERS)) for part in parts)
    if (state := mixer_of(local_spec(spec, reader.share), index).state) is not None:
        cache = with_states(cache, ops.zeros(state.shape(ANSWERS)))

    width = spec.layers * spec.inputs.width

    def seconds(rows: int, batch: Batch) -> float:
        given = dataclasses.replace(batch, inputs=ops.zeros((rows, width))) if width else batch

        def run() -> Array:
            x: Array = ops.zeros((rows, spec.hidden))
            return BLOCKS[spec.join](ops, layer, x, layer.attn_norm(ops, x), given, cache, None)[1]

        return _least(lambda: ops.record(run).run) / rows

    return seconds(PROMPT, _prompt(size)), seconds(ANSWERS, _answers(size))


def _least(made: Callable[[], Callable[[], object]]) -> float:
    run, spent = made(), []
    for _ in range(TURNS):
        begin = time.perf_counter()
        run()
        spent.append(time.perf_counter() - begin)
    return min(spent)


def _prompt(block_size: int) -> Batch:
    """One sequence that begins."""
    at = np.arange(PROMPT)
    blocks = np.arange(-(-PROMPT // block_size))[None]
    return _batch(at, at, np.array([0, PROMPT]), blocks)


def _answers(block_size: int) -> Batch:
    """A token of each of several sequences."""
    at = np.arange(ANSWERS)
    return _batch(at * 0, at * block_size, np.arange(ANSWERS + 1), at[:, None])


def _batch(positions: Host, slots: Host, ends: Host, blocks: Host) -> Batch:
    return Batch(
        tokens=np.zeros(len(positions), I32), positions=positions.astype(I32), slots=slots, cu_q=ends.astype(I32),
        context=np.diff(ends).astype(I32), block_tables=blocks.astype(I32), logit_rows=np.zeros(0, I32),
        states=_states(ends.astype(I32)),
    )  # fmt: skip


def _states(ends: Host) -> StateBatch:
    """Each sequence has a slot that it reads, and writes after its rows."""
    own, none = np.arange(len(ends) - 1, dtype=I32), np.full(len(ends) - 1, -1, I32)
    return StateBatch(ends, own, np.stack((np.diff(ends), none * 0), 1), np.stack((own, none), 1))
