"""The choice of the backend; each is imported when it is chosen, torch with those of torch."""

from __future__ import annotations

import importlib

from quire.core.config import DeviceConfig
from quire.ops.backend import Ops
from quire.ops.choice import backend_of, devices
from quire.ops.lazy import require_torch


def select(device: DeviceConfig) -> Ops:
    """The backend for `device`, as `backend_of` says: what `open_ops` of `backend.py` in its folder gives."""
    name = backend_of(device)
    row = devices()[name]
    if row.extra:
        require_torch(f"--device {row.option}", row.extra)
    found: Ops = importlib.import_module(f"quire.ops.{name}.backend").open_ops(device)
    return found
