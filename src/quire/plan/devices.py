"""Machines to plan for: devices by what their makers publish (`devices.toml`), own ones, and the one this runs on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from quire.core.errors import ConfigError
from quire.core.options.values import near_names

GB, TERA = 10**9, 10**12
BANDWIDTH, ARITHMETIC = 0.8, 0.6
"""Shares of a datasheet's peaks that are assumed to be reached: of memory in decodes, of dense products in prompts."""
HOST_SECONDS = 0.0005
"""Assumed of a step beside its kernels: planning ahead and graphs hide the rest."""
LINK_SECONDS = 10e-6
"""Assumed of a collective beside its bytes."""
OWN_LINK = 64 * GB / 2
"""Bytes/s assumed between devices that name no link: PCIe 4.0 x16."""
USE_HOURS = 3 * 365 * 24
"""Hours of use over which the price of a device is spread: three years."""
KINDS = ("gpu", "consumer", "apple", "cpu")


@dataclass(frozen=True)
class DeviceSheet:
    """One device as its datasheet has it: bytes, bytes/s, dense operations/s (a multiply-add is two) by the bits of
    what is multiplied, bytes/s of the link to others in one direction.

    `source`: the document; `hour`: USD an hour, 0 where nobody says, `sold` by whom; `note`: what a plan says beside.
    """

    name: str
    memory: int
    bandwidth: float
    flops: Mapping[int, float]
    link: float
    source: str
    kind: str = "gpu"
    hour: float = 0.0
    sold: str = ""
    note: str = ""

    @property
    def backend(self) -> str:
        """The backend of quire's that runs there: of Apple's chips the processor cores."""
        return "cpu" if self.kind in ("cpu", "apple") else "triton"

    @property
    def links(self) -> bool:
        """Whether several make one engine."""
        return self.backend != "cpu"

    def peak(self, bits: int) -> float:
        """Operations/s on operands of so many bits; on what has no units for them, those of 16."""
        return self.flops.get(bits, self.flops[16])


def _device(name: str, row: Mapping[str, Any]) -> DeviceSheet:
    flops = {16: row["flops16"] * TERA} | ({8: row["flops8"] * TERA} if "flops8" in row else {})
    hour, sold = row.get("hour", 0.0), row.get("sold", "")
    if price := row.get("price"):
        hour, sold = price / USE_HOURS, f"launch price of {price:,} USD over three years, without power"
    link = row["link"] * GB / 2 if "link" in row else OWN_LINK
    return DeviceSheet(
        name, round(row["memory"] * GB), row["bandwidth"] * GB, flops, link, row["source"], row["kind"], hour, sold,
        row.get("note", ""),
    )  # fmt: skip


DEVICES: dict[str, DeviceSheet] = {
    name: _device(name, row)
    for name, row in msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes()).items()
}
THIS = "this"
"""The machine that runs this."""
SHOWN = 14
"""Devices that an error names."""


def device_of(name: str) -> DeviceSheet | None:
    """The device of that name; None for this machine. `ConfigError` names those there are."""
    if name == THIS:
        return None
    if name not in DEVICES:
        near = near_names(name, DEVICES)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        some = f"{THIS}, {', '.join([*DEVICES][:SHOWN])} and {len(DEVICES) - SHOWN} more (docs/plan)"
        raise ConfigError(f"--device {name}: not one of {some}{hint}", param="device")
    return DEVICES[name]


def own_device(
    base: DeviceSheet | None, memory_gb: float = 0.0, bandwidth_gbs: float = 0.0, tflops: float = 0.0
) -> DeviceSheet:
    """A device by figures of a user's (GB, GB/s, 10^12 operations/s on 16-bit numbers), those that are 0 as `base`.

    `ConfigError` where there is no base and a figure lacks.
    """
    given = {"memory_gb": memory_gb, "bandwidth_gbs": bandwidth_gbs, "tflops": tflops}
    for name, value in given.items():
        if not value and base is None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is needed of an own device, or a --device whose figures change", param=name)
    if base is None:
        made = DeviceSheet("own", 0, 0.0, {}, OWN_LINK, "figures that were given")
    else:
        made = replace(base, name=f"{base.name}-changed", source=f"{base.source}; with figures that were given")
    if memory_gb:
        made = replace(made, memory=round(memory_gb * GB))
    if bandwidth_gbs:
        made = replace(made, bandwidth=bandwidth_gbs * GB)
    if tflops:
        ratio = made.peak(8) / made.peak(16) if made.flops else 1.0
        made = replace(made, flops={16: tflops * TERA, 8: ratio * tflops * TERA})
    return made


def devices_named(text: str) -> list[DeviceSheet]:
    """Devices of `--devices`: all, or names and kinds with commas between them. `ConfigError` for another word."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    found: dict[str, DeviceSheet] = {}
    for word in words:
        of = [d for d in DEVICES.values() if word in ("all", d.kind, d.name)]
        if not of:
            near = near_names(word, (*DEVICES, *KINDS, "all"))
            hint = f"did you mean {', '.join(near)}?" if near else f"names are {', '.join(DEVICES)}"
            raise ConfigError(f"--devices {word}: neither all, {', '.join(KINDS)} nor a name; {hint}", param="devices")
        found |= {each.name: each for each in of}
    if not found:
        raise ConfigError("--devices: names nothing; give all", param="devices")
    return list(found.values())


def with_prices(devices: Sequence[DeviceSheet], text: str) -> list[DeviceSheet]:
    """Devices with prices of "h100=2.5,l4=0.7", an hour of one. `ConfigError` for what is no price or no device."""
    prices: dict[str, float] = {}
    for word in filter(None, (each.strip() for each in text.split(","))):
        name, _, value = word.partition("=")
        try:
            price = float(value)
        except ValueError:
            price = -1.0
        if name not in DEVICES or not 0 < price < float("inf"):
            raise ConfigError(f"--prices {word}: DEVICE=PRICE is needed, of an hour, as h100=2.5", param="prices")
        prices[name] = price
    return [replace(d, hour=prices[d.name], sold="--prices") if d.name in prices else d for d in devices]
