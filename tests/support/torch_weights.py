"""Formats of weights for tests that compute with torch: tensors in, weights of tensors out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.ops.arrays import to_numpy
from quire.ops.lazy import array_dtype
from quire.ops.weights import as_tensors
from quire.quant.base import Quantizer, QuantScheme, QWeight
from quire.quant.registry import load


def load_torch(scheme: QuantScheme, parts: Mapping[str, Tensor], dtype: torch.dtype, float8: int = 0) -> QWeight:
    """A matrix of a checkpoint in `scheme` from its parts, as of `quire.quant.registry.load`."""
    return QWeight(as_tensors(load(scheme, parts, array_dtype(dtype), float8).weight))


def quantize_torch(scheme: Quantizer, w: Tensor, group: int) -> QWeight:
    """The matrix w [n, k] as `scheme` makes it at load."""
    return QWeight(as_tensors(scheme.quantize(to_numpy(w), group).weight))
