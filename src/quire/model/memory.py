"""What a model takes, in bytes."""

from __future__ import annotations

from quire.model.spec import ModelSpec


def kv_bytes_per_token(spec: ModelSpec, element_bytes: int) -> int:
    """2 x layers x kv_heads x head_dim x bytes, layers that read another's cache not counted.

    Latent attention: layers x (rank + rope) x bytes.
    """
    if spec.mla.rank:
        return spec.layers * (spec.mla.rank + spec.mla.rope) * element_bytes
    return 2 * len(spec.own_layers) * spec.kv_heads * spec.head_dim * element_bytes


def weight_bytes(parameters: int, bits: float) -> int:
    """Parameters x bits / 8; with group scales of 16 bits, `bits` is bits + 16 / group."""
    return round(parameters * bits / 8)
