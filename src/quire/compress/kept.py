"""Matrices in some format as named tensors and facts, as a work folder keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor

from quire.ops.weights import ARRAYS, Weight

SCALAR_FIELDS = tuple(f.name for f in fields(Weight) if f.name not in ARRAYS)


def weights_to_tensors(weights: Mapping[str, Weight]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors by "name/part", facts by name) of weights by name."""
    tensors = {
        f"{name}/{part}": tensor
        for name, weight in weights.items()
        for part in ARRAYS
        if (tensor := getattr(weight, part)) is not None
    }
    return tensors, {name: {fact: getattr(weight, fact) for fact in SCALAR_FIELDS} for name, weight in weights.items()}


def weights_from_tensors(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> dict[str, Weight]:
    """The inverse of `weights_to_tensors`."""
    parts: dict[str, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition("/")
        parts.setdefault(name, {})[part] = tensor
    return {name: Weight(**found, **facts[name]) for name, found in parts.items()}
