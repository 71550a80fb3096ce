"""Machines to plan for: named GPUs by their makers' datasheets, and the one this runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.core.errors import ConfigError

GB, TERA = 10**9, 10**12
BANDWIDTH, ARITHMETIC = 0.8, 0.6
"""Shares of a datasheet's peaks that are assumed to be reached: of memory in decodes, of dense products in prompts."""
HOST_SECONDS = 0.0005
"""Assumed of a step beside its kernels: planning ahead and graphs hide the rest."""
LINK_SECONDS = 10e-6
"""Assumed of a collective beside its bytes."""


@dataclass(frozen=True)
class GpuSheet:
    """One GPU as its datasheet has it: bytes, bytes/s, dense operations/s (a multiply-add is two) by the bits of what
    is multiplied, bytes/s of the link to others in one direction. `source`: the document.
    """

    name: str
    memory: int
    bandwidth: float
    flops: Mapping[int, float]
    link: float
    source: str

    def peak(self, bits: int) -> float:
        """Operations/s on operands of so many bits; on what has no units for them, those of 16."""
        return self.flops.get(bits, self.flops[16])


def _device(name: str, memory: float, bandwidth: float, half: float, byte: float, link: float, source: str) -> GpuSheet:
    """Make a device of figures in GB, TB/s, TFLOPS dense in 16 and 8 bits, GB/s both ways."""
    flops = {16: half * TERA, 8: byte * TERA}
    return GpuSheet(name, round(memory * GB), bandwidth * TERA, flops, link * GB / 2, source)


_A100 = "NVIDIA A100 Tensor Core GPU datasheet, 2021"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet, 2023 (SXM; half of the rates with sparsity)"
DEVICES: dict[str, GpuSheet] = {
    device.name: device
    for device in (
        _device("a100-40gb", 40, 1.555, 312, 624, 600, _A100),
        _device("a100-80gb", 80, 2.039, 312, 624, 600, _A100 + " (SXM)"),
        _device("h100", 80, 3.35, 989.5, 1979, 900, _H100),
        _device("h200", 141, 4.8, 989.5, 1979, 900, "NVIDIA H200 Tensor Core GPU datasheet, 2024 (SXM; half as above)"),
        _device("b200", 180, 8.0, 2250, 4500, 1800, "NVIDIA DGX B200 datasheet, 2024 (an eighth; half of the rates "
                "with sparsity)"),
        _device("l4", 24, 0.3, 121, 242.5, 64, "NVIDIA L4 Tensor Core GPU datasheet, 2023 (half of the rates with "
                "sparsity; PCIe 4.0 x16)"),
        _device("l40s", 48, 0.864, 362, 733, 64, "NVIDIA L40S datasheet, 2023 (PCIe 4.0 x16)"),
        _device("a10", 24, 0.6, 125, 250, 64, "NVIDIA A10 Tensor Core GPU datasheet, 2021 (PCIe 4.0 x16)"),
        _device("t4", 16, 0.3, 65, 130, 32, "NVIDIA T4 datasheet, 2019 (float16; PCIe 3.0 x16)"),
        _device("mi300x", 192, 5.3, 1307.4, 2614.9, 896, "AMD Instinct MI300X data sheet, 2023"),
    )
}  # fmt: skip
THIS = "this"


def device_of(name: str) -> GpuSheet | None:
    """The GPU of that name; None for this machine. `ConfigError` names those there are."""
    if name == THIS:
        return None
    if name not in DEVICES:
        raise ConfigError(f"--device {name}: not one of {THIS}, {', '.join(DEVICES)}", param="device")
    return DEVICES[name]
