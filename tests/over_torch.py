"""The CPU backend over torch tensors, which share their memory with the arrays that its ops read and write.

Cases and oracles of tests are torch's: `select` gives what they can call.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.core.config import DeviceConfig
from quire.core.tree_map import rebuilt
from quire.ops.arrays import is_tensor, to_numpy, to_torch
from quire.ops.backend import Ops, open_backend
from quire.ops.choice import OPS
from quire.ops.cpu.backend import CpuOps

TAKEN = {*OPS, "pack", "pack_stack", "pack_exact", "group", "put", "place", "copy_out"}
"""What is given arrays."""
GIVEN = {*OPS, "allocate_cache", "empty", "zeros", "put", "place", "copy_out"} - {"sample", "top_logprobs"}
"""What gives arrays that are torch's here; what is drawn is numpy's on every backend."""


def arrays(value: Any) -> Any:
    """`value` with numpy arrays of the memory of its tensors."""
    return rebuilt(value, lambda part: to_numpy(part) if is_tensor(part) else part)


def tensors(value: Any) -> Any:
    """`value` with tensors of the memory of its arrays; records stay."""

    def change(part: Any) -> Any:
        return to_torch(part) if isinstance(part, np.ndarray) and part.dtype.names is None else part

    return rebuilt(value, change)


class OverTorch:
    """`ops` whose arguments and results are torch's."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.ops, name)
        if name not in TAKEN | GIVEN:
            return found

        def call(*args: Any, **named: Any) -> Any:
            made = found(*(arrays(arg) for arg in args), **{key: arrays(arg) for key, arg in named.items()})
            return tensors(made) if name in GIVEN else made

        return call


def over_torch(ops: Ops) -> Any:
    """`ops` for torch tensors, which those of other backends than the CPU's take anyhow."""
    return OverTorch(ops) if isinstance(ops, CpuOps) else ops


def select(device: DeviceConfig) -> Any:
    """As `quire.ops.backend.open_backend`, over torch tensors."""
    return over_torch(open_backend(device))
