"""What the implementations of the GPU backend share: the device, memory, tuned sizes, and ways to and from the host."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.errors import ConfigError
from quire.core.exclusions.features import CUSPARSELT, NOT_SPARSE
from quire.core.exclusions.table import row_of
from quire.ops.runtime import Runtime
from quire.ops.triton.runtime import Cuda, Immediate

CONFIGS = Path(__file__).parent / "configs"
"""One file per kernel: a list of rows {"device": name or "", "when": {fact: [low, high]}, "use": {size: number}}."""


@dataclass(frozen=True)
class Chip:
    """What kernels are chosen by. `name`: the device's own; `processors`: its multiprocessors; `shared`: KiB of shared
    memory that a program may take; `float8`: it converts and multiplies e4m3 (NVIDIA from compute capability 8.9 on);
    `ptx`: it takes NVIDIA's assembly."""

    name: str
    processors: int
    shared: int
    float8: bool
    ptx: bool


INTERPRETER = Chip("interpreter", 4, 227, True, False)
"""The CPU under Triton's interpreter, which multiplies every type."""


class Gpu:
    """One device. Under Triton's interpreter (TRITON_INTERPRET=1) it is the CPU, for tests: same kernels, no GPU.

    `chip` chooses kernels, and rows of `CONFIGS`; `interpreted`: kernels run as Python. `runtime` queues work.
    `sparse`: 2:4 matrices are kept without their zeros; `sparse_units`: also as torch's sparse products read them.
    """

    sparse = sparse_units = False

    def __init__(self, device: torch.device, chip: Chip, interpreted: bool, runtime: Runtime) -> None:
        self.device, self.chip, self.interpreted, self.runtime = device, chip, interpreted, runtime
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self.chosen: dict[tuple[Any, ...], dict[str, int]] = {}

    @property
    def name(self) -> str:
        """The device's own."""
        return self.chip.name

    @property
    def ptx(self) -> bool:
        """Whether kernels may hold NVIDIA's assembly."""
        return self.chip.ptx and not self.interpreted

    @property
    def converts_float8(self) -> bool:
        """Whether e4m3 is widened by an instruction; the interpreter's is wrong."""
        return self.chip.float8 and not self.interpreted

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialized tensor; inside a capture its memory belongs to the graph."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def config(self, kernel: str, **facts: int) -> dict[str, int]:
        """Sizes (block shapes, num_warps, num_stages) of `kernel` for `facts` (n=4096): those of the row that fits.

        Rows of this device come before those of any; the first whose named facts lie in its ranges fits. The chip's
        `shared` is a fact too. Results must not depend on facts of the batch that change the order of a sum.
        `ConfigError` when no row fits.
        """
        key = (kernel, *facts.items())
        found = self.chosen.get(key)
        if found is None:
            found = self.chosen[key] = choose_row(
                self._table(kernel), self.name, kernel, facts | {"shared": self.chip.shared}
            )
        return found

    def _table(self, kernel: str) -> list[dict[str, Any]]:
        rows = self._rows.get(kernel)
        if rows is None:
            rows = self._rows[kernel] = json.loads((CONFIGS / f"{kernel}.json").read_text())
        return rows

    def upload(self, array: NDArray[Any]) -> Tensor:
        """A copy of `array` on the device, in the order of the main queue; `array` may be changed at once."""
        host = self.runtime.pinned(max(1, array.nbytes))[: array.nbytes].view(torch.from_numpy(array[:0]).dtype)
        host.numpy()[:] = array.reshape(-1)
        return host.to(self.device, non_blocking=True).view(array.shape)


def choose_row(rows: list[dict[str, Any]], device: str, kernel: str, facts: dict[str, int]) -> dict[str, int]:
    """The sizes of the first row that fits, rows of `device` first."""
    for name in (device, ""):
        for row in rows:
            ranges = row.get("when", {})
            if row.get("device", "") == name and all(low <= facts[f] <= high for f, (low, high) in ranges.items()):
                sizes: dict[str, int] = row["use"]
                return sizes
    raise ConfigError(f"ops/triton/configs/{kernel}.json has no row for {facts}; its last row must fit everything")


def load_kernels() -> None:
    """Import every module of ops/triton, which registers its implementations."""
    package = importlib.import_module("quire.ops.triton")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"quire.ops.triton.{module.name}")


def interpreting() -> bool:
    """Whether kernels would run as Python. Imports Triton."""
    knobs = importlib.import_module("triton.knobs")
    return bool(knobs.runtime.interpret)


def why_no_gpu() -> str:
    """Why the GPU backend cannot run here; empty when it can. Imports Triton only if a GPU is there."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install 'quire[gpu]'"
    if not torch.cuda.is_available():
        built = "sees no GPU" if torch.version.cuda or torch.version.hip else "was built without CUDA"
        return f"this torch ({torch.__version__}) {built}"
    return ""


def chip_of(device: torch.device) -> Chip:
    """The facts of a GPU; the bytes of shared memory are those that Triton itself holds launches to."""
    nvidia = torch.version.hip is None
    found = importlib.import_module("triton.runtime").driver.active.utils.get_device_properties(device.index)
    return Chip(
        torch.cuda.get_device_name(device),
        int(found["multiprocessor_count"]),
        int(found["max_shared_mem"]) >> 10,
        nvidia and torch.cuda.get_device_capability(device) >= (8, 9),
        nvidia,
    )


def check_sparse_units(gpu: Gpu) -> None:
    """`ConfigError` where torch multiplies no 2:4 matrices, or where they would not be kept."""
    cusparselt: Any = getattr(torch.backends, "cusparselt", None)
    if gpu.device.type != "cuda" or cusparselt is None or not cusparselt.is_available():
        raise ConfigError("--ops linear=cusparselt: this torch has no cuSPARSELt for this device", param="ops")
    if not gpu.sparse:
        raise row_of(CUSPARSELT, NOT_SPARSE).refusal({})


def open_gpu() -> Gpu:
    """The current GPU, or the CPU under Triton's interpreter; `ConfigError` with the reason when there is neither."""
    reason = why_no_gpu()
    if not reason:
        device = torch.device("cuda", torch.cuda.current_device())
        gpu = Gpu(device, chip_of(device), interpreting(), Cuda(device))
    elif importlib.util.find_spec("triton") is not None and interpreting():
        gpu = Gpu(torch.device("cpu"), INTERPRETER, True, Immediate())
    else:
        raise ConfigError(f"--device cuda: {reason}", param="device")
    load_kernels()
    return gpu


@dataclass(frozen=True)
class GpuFacts:
    """What `quire doctor` shows of a GPU; memory in bytes. `tuned`: whose sizes the kernels would use."""

    name: str
    architecture: str
    processors: int
    free: int
    total: int
    triton: str
    tuned: str


def gpu_facts() -> GpuFacts:
    """Facts of the current GPU, which must be there."""
    device = torch.cuda.current_device()
    found = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    own = [
        p.stem for p in CONFIGS.glob("*.json") if any(r.get("device") == found.name for r in json.loads(p.read_text()))
    ]
    architecture = getattr(found, "gcnArchName", "") or f"sm_{found.major}{found.minor}"
    version = importlib.metadata.version("triton")
    tuned = f"for this device: {', '.join(sorted(own))}" if own else "none for this device; those of any are used"
    return GpuFacts(found.name, architecture, found.multi_processor_count, free, total, version, tuned)


def as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Records as the bytes they are, for `Gpu.upload`."""
    return np.ascontiguousarray(array).view(np.uint8)
