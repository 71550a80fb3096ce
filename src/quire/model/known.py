"""Features of a model and of a device, as the table of exclusions knows them. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping

from quire.core.config import EngineConfig
from quire.core.exclusions.exclusion import Known
from quire.core.exclusions.features import (
    BIDIRECTIONAL,
    BORROWED,
    GPU,
    GPU_PROCESSES,
    HEARING,
    IMAGES,
    LAYER_INPUTS,
    NO_EXPERTS,
    NO_GPU,
    PASSING,
    PROJECTED,
    QUANTIZED,
    REFERENCE_OPS,
    STREAMS,
    TURNS,
    UNLIKE_LAYERS,
    found,
)
from quire.model.describe import ModelFacts
from quire.model.disk.headers import ModelHeaders
from quire.model.mixers.layer_mixers import features_of
from quire.ops.choice import READ_WEIGHTS
from quire.quant.registry import quantizer


def known_of(config: EngineConfig, model: ModelFacts | ModelHeaders) -> Known:
    """Known features of a model whose headers were read; `config`: of the engine, which may leave out what reads
    images."""
    spec, words = model.spec, {"model": model.name, "family": model.spec.family, "folder": str(model.folder)}
    if isinstance(model, ModelFacts) and model.borrowed:
        return Known(frozenset({BORROWED}), words)
    kept = model.scheme if isinstance(model, ModelFacts) else model.scheme.name
    again = model.quantized and quantizer(config.model.quantization, model.stored) is not None
    takes_images = model.vision is not None and not config.model.language_model_only
    there = found(
        (NO_EXPERTS, not any(spec.moe.sparse)),
        (IMAGES, takes_images),
        (PROJECTED, spec.embed_width != spec.hidden or bool(spec.edges.activation)),
        (QUANTIZED, again),
        (LAYER_INPUTS, spec.inputs.width > 0),
        (STREAMS, spec.streams.count > 0),
        (BIDIRECTIONAL, spec.bidirectional),
        (TURNS, spec.streams.turns.stack > 0),
        (HEARING, spec.encoder.rows > 0),
        (PASSING, spec.moe.late),
        (UNLIKE_LAYERS, len({(size.heads, size.kv_heads, size.head_dim) for size in spec.sizes}) > 1),
    )
    return Known(there | features_of(spec), words | {"scheme": kept})


def known_of_device(config: EngineConfig, backend: str, chosen: Mapping[str, str]) -> Known:
    """Known features of the device that was chosen. `chosen`: op -> implementation."""
    on_gpu = backend == "triton"
    there = found(
        (GPU, on_gpu),
        (NO_GPU, not on_gpu),
        (REFERENCE_OPS, any(chosen.get(op) == "reference" for op in READ_WEIGHTS)),
        (GPU_PROCESSES, on_gpu and config.parallel.processes > 1),
    )
    return Known(there, {"backend": backend})
