"""Devices that `quire plan` knows, from its table."""

from __future__ import annotations

from quire.plan.devices import DEVICES
from words import table


def planned() -> str:
    """Every device of the table with its figures and their source."""
    rows = [
        (
            f"`{device.name}`", device.kind, f"{device.memory / 1e9:,.4g}", f"{device.bandwidth / 1e9:,.4g}",
            f"{device.peak(16) / 1e12:,.4g}", f"{device.hour:.3f}" if device.hour else "", device.source,
        )
        for device in DEVICES.values()
    ]  # fmt: skip
    return table(("device", "kind", "GB", "GB/s", "TFLOPS, 16 bits", "USD an hour", "source of the figures"), rows)
