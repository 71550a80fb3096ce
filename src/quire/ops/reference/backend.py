"""The reference backend: every op is its definition, over torch tensors on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.core.config import DeviceConfig
from quire.core.dtypes import F32, Dtype
from quire.ops.arrays import Host, to_torch
from quire.ops.backend import Ops
from quire.ops.lazy import torch_dtype
from quire.ops.op import load_definitions
from quire.ops.weights import Packed, StoredMatrix, Weight, plain_packed


class ReferenceRecording:
    """A step that is computed again: there is nothing to record."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        self._fn, self.output = fn, fn()

    def run(self) -> Any:
        """Call the function; returns what it returns."""
        self.output = self._fn()
        return self.output


class ReferenceOps(Ops):
    """Slow, for comparison."""

    name = "reference"
    isa = "torch"

    def __init__(self, overrides: tuple[str, ...] = ()) -> None:
        load_definitions()
        super().__init__({}, overrides)

    def put(self, array: Any) -> Tensor:
        """`array` as torch's."""
        return to_torch(array)

    def share(self, array: Host) -> Tensor:
        """A tensor of the same memory."""
        return to_torch(array)

    def zeros(self, shape: tuple[int, ...], dtype: Dtype = F32) -> Tensor:
        """Zeroed memory."""
        return torch.zeros(shape, dtype=torch_dtype(dtype))

    def pack(self, weight: Weight | StoredMatrix, narrow: bool = False) -> Packed:
        """`weight` as it is."""
        assert isinstance(weight, Weight)
        return plain_packed(self.place(weight))

    def record(self, fn: Callable[[], Any]) -> ReferenceRecording:
        """Run `fn`; what repeats it calls it again."""
        return ReferenceRecording(fn)


def open_ops(device: DeviceConfig) -> ReferenceOps:
    """Open the reference backend as `device` asks."""
    return ReferenceOps(device.ops)
