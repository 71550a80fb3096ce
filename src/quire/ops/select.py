"""The choice of the backend; each is imported when it is chosen, torch with those of torch."""

from __future__ import annotations

from quire.core.config import DeviceConfig
from quire.ops.backend import Ops
from quire.ops.choice import backend_of
from quire.ops.lazy import require_torch


def select(device: DeviceConfig) -> Ops:
    """The backend for `device`, as `backend_of` says: "triton" kernels, "cpu" native, "reference" torch."""
    name = backend_of(device)
    if name == "reference":
        require_torch("--device reference", "train")
        from quire.ops.reference.backend import ReferenceOps

        return ReferenceOps(device.ops)
    if name == "triton":
        require_torch("--device cuda", "gpu")
        from quire.ops.triton.backend import open_ops

        return open_ops(device)
    from quire.ops.cpu.backend import CpuOps

    return CpuOps.open(device)
