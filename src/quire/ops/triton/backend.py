"""The GPU backend: Triton's kernels over torch tensors, steps recorded as CUDA graphs. See docs/design/gpu.md."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.core.config import DeviceConfig
from quire.core.dtypes import F32, Dtype
from quire.ops.arrays import Array, Fetched, Host, to_torch
from quire.ops.backend import Ops
from quire.ops.experts import Grouped
from quire.ops.lazy import torch_dtype
from quire.ops.op import IMPLEMENTATIONS
from quire.ops.triton.gpu import Gpu, check_sparse_units, open_gpu
from quire.ops.triton.pack import pack
from quire.ops.weights import Packed, StoredMatrix, Weight


class GraphRecording:
    """A recorded step: a CUDA graph. `output` lies at a fixed address."""

    def __init__(self, gpu: Gpu, fn: Callable[[], Tensor]) -> None:
        self._replay, self.output = gpu.runtime.capture(fn)

    def run(self) -> Tensor:
        """Queue the step again on the same addresses; returns `output`, which will hold the new values."""
        self._replay()
        return self.output


class GpuOps(Ops):
    """The kernels on one device. `gpu` is what they share."""

    name = "triton"
    queues = pads = True

    def __init__(self, gpu: Gpu, overrides: tuple[str, ...]) -> None:
        self.gpu, self.runtime, self.isa, self.compiles = gpu, gpu.runtime, gpu.name, not gpu.interpreted
        own: dict[str, Callable[..., Any]] = {}
        for op, fns in IMPLEMENTATIONS.items():
            for backend, fn in fns.items():
                base, _, other = backend.partition(":")
                if base == self.name:
                    own[f"{op}:{other}" if other else op] = functools.partial(fn, gpu)
        super().__init__(own, overrides)

    @property
    def identity(self) -> tuple[Any, ...]:
        """Identity with the chip's facts, by which kernels are chosen."""
        return *super().identity[:-1], repr(self.gpu.chip)

    def put(self, array: Any) -> Tensor:
        """`array` on the device."""
        return to_torch(array).to(self.gpu.device)

    def host(self, array: Any) -> Host:
        """A copy on the host, waited for."""
        return super().host(array.cpu())

    def zeros(self, shape: tuple[int, ...], dtype: Dtype = F32) -> Tensor:
        """Zeroed memory of the device."""
        return torch.zeros(shape, dtype=torch_dtype(dtype), device=self.gpu.device)

    def fetch(self, found: Sequence[Array]) -> Fetched:
        """Copies behind the work that is queued."""
        return self.runtime.fetch([torch.as_tensor(each) for each in found])

    def pack(self, weight: Weight | StoredMatrix, narrow: bool = False) -> Packed:
        """`weight` in the layout that the kernels read, on the device."""
        assert isinstance(weight, Weight)
        return pack(self.gpu, self.place(weight), keep_plain=self.refers)

    def row_dtype(self, table: Dtype) -> Dtype:
        """Dtype of rows: that of the token table."""
        return table

    def head_dtype(self, dtype: Dtype) -> Dtype:
        """Dtype of the head: that of the token table."""
        return dtype

    def pack_exact(self, numbers: Any) -> Packed:
        """Pack in f32: its products of bf16 round activations."""
        return self.pack(Weight("f32", numbers))

    def fuses_mlp(self, gate_up: Packed, down: Packed) -> bool:
        """Return False: there are no fused kernels."""
        return False

    def fuses_experts(self, down: Grouped) -> bool:
        """Return False: there are no fused kernels."""
        return False

    @property
    def reads_packed_tables(self) -> bool:
        """`embedding` reads tables of numbers only."""
        return False

    def float8_activations(self, dtype: Dtype) -> int:
        """Multiply in float8, where the chip multiplies it."""
        return 8 if self.gpu.chip.float8 else 0

    def gather(self, parts: Sequence[Array], tail: Host) -> Callable[[], Host]:
        """Copies are queued where the steps are."""
        kept, fetched = tail.copy(), self.runtime.fetch(parts)
        return lambda: np.concatenate([*fetched(), kept])

    def scatter(self, parts: Sequence[Array], data: Host) -> None:
        """Copies are queued where the steps are."""
        sent = torch.split(self.gpu.upload(data), [len(part) for part in parts])
        self.runtime.place(list(zip(parts, sent, strict=True)))

    def record(self, fn: Callable[[], Tensor]) -> GraphRecording:
        """The CUDA graph of `fn`, captured after a run that compiles its kernels."""
        return GraphRecording(self.gpu, fn)


def open_ops(device: DeviceConfig) -> GpuOps:
    """The current GPU, as `device` has it."""
    gpu = open_gpu()
    gpu.sparse, gpu.sparse_units = device.sparse == "on", "linear=cusparselt" in device.ops
    if gpu.sparse_units:
        check_sparse_units(gpu)
    return GpuOps(gpu, device.ops)
