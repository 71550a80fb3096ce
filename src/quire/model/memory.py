"""What a model takes, in bytes."""

from __future__ import annotations

from quire.core.dtypes import Dtype
from quire.model.spec import ModelSpec


def kv_bytes_per_token(spec: ModelSpec, dtype: Dtype) -> int:
    """Of one token in all layers, those that read another's cache not counted."""
    return sum(spec.mixer(layer).layout(1, dtype).bytes_per_token for layer in spec.own_layers)


def weight_bytes(parameters: int, bits: float) -> int:
    """Parameters x bits / 8; with group scales of 16 bits, `bits` is bits + 16 / group."""
    return round(parameters * bits / 8)
