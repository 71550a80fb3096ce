"""What a model takes, in bytes."""

from __future__ import annotations

from quire.core.dtypes import Dtype
from quire.model.spec import ModelSpec

SCALE_BYTES = 4
"""Of a key or value of one head in formats of one byte (`quire.ops.layout`)."""


def layer_kv_bytes(spec: ModelSpec, dtype: Dtype) -> int:
    """Of one token in the cache of one layer: 2 x kv_heads x head_dim x bytes, and scales where there are any.

    Latent attention: (rank + rope) x bytes.
    """
    if spec.mla.rank:
        return (spec.mla.rank + spec.mla.rope) * dtype.itemsize
    scale = SCALE_BYTES if dtype.itemsize == 1 else 0
    return 2 * spec.kv_heads * (spec.head_dim * dtype.itemsize + scale)


def kv_bytes_per_token(spec: ModelSpec, dtype: Dtype) -> int:
    """Of one token in all layers, those that read another's cache not counted."""
    return len(spec.own_layers) * layer_kv_bytes(spec, dtype)


def weight_bytes(parameters: int, bits: float) -> int:
    """Parameters x bits / 8; with group scales of 16 bits, `bits` is bits + 16 / group."""
    return round(parameters * bits / 8)
