"""What the machine tells of a run beside its time: energy of packages and devices, processor time and largest memory
of processes."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

PACKAGES = Path("/sys/class/powercap")
PROC = Path("/proc")


class Energy:
    """Counters of joules: RAPL's packages (Linux powercap), and NVIDIA's devices (NVML), whichever can be read.

    `sources` names them; where it is empty, `why` says so.
    """

    def __init__(self, packages: Path = PACKAGES) -> None:
        self._rapl = [path for path in sorted(packages.glob("*-rapl:*")) if _microjoules(path) is not None]
        # Zones within a package (intel-rapl:0:1) are parts of it.
        self._rapl = [path for path in self._rapl if path.name.count(":") == 1]
        self._devices = _Nvml.open()
        self.sources = [_name(path) for path in self._rapl] + (["NVML"] if self._devices else [])
        self._last = self._read()

    @property
    def why(self) -> str:
        """Why nothing is known."""
        return "" if self.sources else "energy: no readable counter (powercap's RAPL, NVML)"

    def joules(self) -> float:
        """Joules since the last call, over all sources; a counter that began anew in between counts once around."""
        now = self._read()
        total = 0.0
        for (before, most), (after, _) in zip(self._last, now, strict=True):
            total += after - before if after >= before else after - before + most
        self._last = now
        return total

    def _read(self) -> list[tuple[float, float]]:
        found = [((_microjoules(path) or 0) / 1e6, (_number(path / "max_energy_range_uj") or 0) / 1e6)
                 for path in self._rapl]  # fmt: skip
        return found + ([(joules, 0.0) for joules in self._devices.joules()] if self._devices else [])


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _microjoules(zone: Path) -> int | None:
    return _number(zone / "energy_uj")


def _name(zone: Path) -> str:
    try:
        return f"RAPL {(zone / 'name').read_text().strip()}"
    except OSError:
        return f"RAPL {zone.name}"


class _Nvml:
    """The driver's library, where there is one."""

    def __init__(self, library: ctypes.CDLL, handles: list[ctypes.c_void_p]) -> None:
        self._library, self._handles = library, handles

    @classmethod
    def open(cls) -> _Nvml | None:
        """None without a driver, or without a device that counts its energy (before Volta)."""
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return None
        count = ctypes.c_uint()
        if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return None
        handles = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if not library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
                handles.append(handle)
        found = cls(library, handles)
        return found if handles and all(found.joules()) else None

    def joules(self) -> list[float]:
        """Joules of each device since its driver was loaded; 0 where it does not say."""
        found = []
        for handle in self._handles:
            millijoules = ctypes.c_ulonglong()
            bad = self._library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
            found.append(0.0 if bad else millijoules.value / 1e3)
        return found


def cpu_seconds(pid: int, proc: Path = PROC) -> float:
    """Processor time of a process and those it started, user and system; 0 where the system does not tell."""
    return sum(family_of(pid, proc).values())


def family_of(pid: int, proc: Path = PROC) -> dict[int, float]:
    """Processor seconds so far of a process and those it started, by process id; empty where the system does not
    tell."""
    children: dict[int, list[int]] = {}
    used: dict[int, float] = {}
    for entry in proc.glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry.name))
            used[int(entry.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    family = [pid]
    for one in family:
        family += children.get(one, [])
    return {one: used[one] for one in family if one in used}


def peak_bytes(pid: int, proc: Path = PROC) -> tuple[int, int]:
    """Largest resident memory of a process and those it started, added up (memory they share counts in each), and how
    many they are; (0, 0) where the system does not tell."""
    peaks = []
    for one in family_of(pid, proc):
        with suppress(OSError, ValueError):
            lines = (proc / str(one) / "status").read_text().splitlines()
            peaks += [1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return sum(peaks), len(peaks)
