"""What the edge is told of a loaded engine."""

from __future__ import annotations

from quire.core.config import EngineConfig
from quire.core.files import sampled_digest
from quire.core.images import ImageLimits
from quire.core.request import DecoderStart
from quire.engine.client import EngineInfo
from quire.features.images.plan_images import EncoderScheduler
from quire.features.pooling.edge_pooled_requests import pooling_of
from quire.model.build import Model
from quire.model.mixers.layer_mixers import format_of
from quire.ops.backend import Ops
from quire.run.kv_budget import KVPlan


def engine_info(
    config: EngineConfig,
    model: Model,
    ops: Ops,
    places: tuple[KVPlan, int],
    load_seconds: float,
    adapters: tuple[str, ...],
    decoder_start: DecoderStart | None,
    encoding: EncoderScheduler | None,
) -> EngineInfo:
    """Facts the edge needs. `places`: the KV cache, and its bytes of a token; `adapters`: names of those loaded;
    `encoding`: who plans what is encoded of images, where any are taken."""
    kv, bytes_per_token = places
    return EngineInfo(
        model=model.name,
        served_name=next(iter(config.model.served_model_name), model.name),
        folder=str(model.folder),
        vocab_size=model.spec.vocab_size,
        max_model_len=kv.max_model_len,
        eos_token_ids=model.eos_token_ids,
        block_size=config.cache.block_size,
        num_blocks=kv.blocks,
        kv_bytes_per_token=bytes_per_token,
        weight_bytes=model.weight_bytes,
        max_num_queued_reqs=config.scheduler.max_num_queued_reqs,
        load_seconds=load_seconds,
        backend=ops.name,
        isa=ops.isa,
        threads=ops.threads,
        dtype=model.dtype,
        quantization=model.quantization,
        kv_cache_dtype=str(format_of(model.layouts)).removeprefix("torch."),
        generation_defaults=model.generation_defaults,
        adapters=adapters,
        max_loras=model.adapters.slots if model.adapters is not None else 0,
        decoder_start=decoder_start,
        scheduling_policy=config.scheduler.scheduling_policy,
        implementations=dict(ops.chosen),
        pooling=pooling_of(config, model),
        takes_images=encoding is not None,
        mmproj="" if model.mmproj is None else str(model.mmproj),
        image_limits=ImageLimits() if encoding is None else encoding.limits.per_image,
        weights=sampled_digest(model.folder) if config.cluster.nnodes > 1 else "",
        kv_cache_bytes=kv.blocks // kv.sizes.holders * kv.block_bytes,
        family=model.spec.family,
        drafts="" if config.speculation.asked is None else config.speculation.asked.method,
    )
