"""Static scales of the KV cache, one a layer for keys and one for values (compressed-tensors' `kv_cache_scheme`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.core.dtypes import F8, I8, Dtype
from quire.core.errors import ModelError
from quire.ops.layout import LARGEST


class KvCacheFormat(NamedTuple):
    """A format of cached keys and values, and what `kv_cache_scheme` says of it."""

    dtype: Dtype
    scheme: dict[str, Any]


def _cache_format(dtype: Dtype, kind: str) -> KvCacheFormat:
    return KvCacheFormat(
        dtype, {"num_bits": 8, "type": kind, "strategy": "tensor", "symmetric": True, "dynamic": False}
    )


KV_CACHE_FORMATS = {"fp8": _cache_format(F8, "float"), "int8": _cache_format(I8, "int")}


@dataclass
class KvCachePeaks:
    """The largest magnitudes that keys and values of one layer had."""

    key: float = 0.0
    value: float = 0.0

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Add keys and values as they are written to the cache (any shape and float dtype)."""
        found = [float(t.abs().amax()) for t in (keys, values)]
        if not all(peak < float("inf") for peak in found):
            raise ModelError("keys or values on the calibration rows hold nan or inf; the model overflows on them")
        self.key, self.value = max(self.key, found[0]), max(self.value, found[1])

    def scales(self, dtype: Dtype = F8) -> tuple[Tensor, Tensor]:
        """Compute (`k_scale`, `v_scale`) f32 [1]: the peak over the largest code of `dtype`, float8_e4m3fn or int8.

        A layer whose keys or values were never seen, or always 0, gets 1.
        """
        scales = [torch.tensor([peak / LARGEST[dtype] or 1.0]) for peak in (self.key, self.value)]
        return scales[0], scales[1]
