"""The CPU backend: ops as calls of the native extension, over numpy arrays."""

from __future__ import annotations

from quire.core.config import DeviceConfig
from quire.ops.choice import BackendFacts
from quire.ops.native import Native


def unit(device: DeviceConfig) -> tuple[str, int]:
    """The instruction set and the threads."""
    native = Native(device.isa, device.threads)
    return native.isa, native.threads


DEVICE = BackendFacts("cpu", unit)
