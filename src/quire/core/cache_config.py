"""Options of the KV cache and of recurrent states."""

from __future__ import annotations

from typing import Annotated

import msgspec

from quire.core.options.fields import about, common

KV_DTYPES = ("auto", "bfloat16", "float16", "float32", "int8", "fp8")


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The paged KV cache. `kv_cache_memory_bytes` 0 = a share of the free memory; on a GPU, what its share has left."""

    block_size: Annotated[int, about("Tokens in one block of the KV cache: a power of two up to 128.")] = 16
    kv_cache_dtype: Annotated[
        str,
        common(
            "Number format of keys and values; auto = that of the weights; int8, fp8: with scales.",
            KV_DTYPES,
        ),
    ] = "auto"
    kv_cache_memory_bytes: Annotated[
        int, common("Size of the KV cache in bytes; 0 = a share of the free memory.", ge=0)
    ] = 0
    gpu_memory_utilization: Annotated[
        float,
        common("Share of the GPU's memory to use. The KV cache gets what the model leaves of it.", gt=0, le=1),
    ] = 0.9
    num_blocks: Annotated[int, about("Number of blocks in the KV cache; 0 = as many as the memory allows.", ge=0)] = 0
    num_state_slots: Annotated[
        int,
        about(
            "Number of slots for the recurrent states of sequences and snapshots of them; 0 = as many as the memory "
            "allows. For models with recurrent layers.",
            ge=0,
        ),
    ] = 0
    state_interval: Annotated[
        int,
        about(
            "Tokens between snapshots of a recurrent state in the prefix cache; 0 = as many as take the memory of a "
            "state.",
            ge=0,
        ),
    ] = 0
    enable_prefix_caching: Annotated[bool, about("Reuse the KV cache of earlier prompts with the same prefix.")] = True
