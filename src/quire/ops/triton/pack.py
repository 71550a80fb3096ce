"""Weights into the layout the kernels stream, on the device. Imports no Triton."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import Tensor

from quire.ops.gpu import Gpu
from quire.ops.weights import Packed, Weight, plain_packed


def pack(gpu: Gpu, weight: Weight, keep_plain: bool = False) -> Packed:
    """`weight` packed for the GPU's `linear`: `handle` is what its launchers read.

    `keep_plain` keeps the unpacked matrix too, for an op overridden with the reference.
    """
    parts = {f.name: getattr(weight, f.name) for f in fields(weight)}
    moved: dict[str, Any] = {k: v.to(gpu.device) if isinstance(v, Tensor) else v for k, v in parts.items()}
    return plain_packed(Weight(**moved))
