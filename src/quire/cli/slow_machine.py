"""What makes this machine slower than it could be, read from /proc and /sys: each thing with what to do about it.

Nothing here measures memory or kernels; `quire doctor` does, and adds what follows from that.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from quire.core.config import ISAS
from quire.core.machine import CPUS, GROUP, Cores, cache_folder, cores

SWAP_LEAST = 64 << 20
OTHERS_LEAST = 0.25
"""CPUs' worth of time of other processes that is worth a word."""
STOLEN_LEAST, THROTTLED_LEAST = 0.02, 0.05
WATCH_SECONDS = 0.3
OWN_GOVERNORS = ("intel_pstate", "amd-pstate-epp", "amd-pstate")
"""Drivers whose `powersave` follows the load as others' `schedutil` does."""
REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "glusterfs", "lustre")
FLAGS: dict[str, frozenset[str]] = {
    "avx512vnni": frozenset({"avx512_vnni", "avx512bw"}),
    "avxvnni": frozenset({"avx_vnni"}),
    "avx2": frozenset({"avx2", "fma"}),
    "neon_i8mm": frozenset({"i8mm"}),
}
"""Words of /proc/cpuinfo that say that a processor has what a unit needs, the fastest unit first."""
BETTER_OR_EQUAL = {unit: ISAS[1 : ISAS.index(unit) + 1] for unit in FLAGS}
SLOW_READ = 6e9
"""Bytes/s per core, for up to `CHANNEL_CORES` cores: below it there is one memory channel, or others use the memory."""
CHANNEL_CORES = 4


class Slow(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that costs speed. `check` is its stable name; `level`: "slow", or "note" where it may be as wanted."""

    check: str
    level: str
    text: str
    advice: str


class System:
    """The files that checks read; a test has others. `sleep` waits between two looks at the processors' times."""

    def __init__(self, root: Path = Path("/"), sleep: Callable[[float], None] = time.sleep) -> None:
        self.root, self.sleep = root, sleep

    def text(self, path: str) -> str:
        """The text of a file; "" where there is none that may be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def number(self, path: str) -> int | None:
        """The number in a file; None where there is none."""
        text = self.text(path)
        return int(text) if text.lstrip("-").isdigit() else None

    def glob(self, pattern: str) -> list[Path]:
        """Paths below the root, relative to it."""
        return sorted(path.relative_to(self.root) for path in self.root.glob(pattern))

    def cores(self) -> Cores:
        """Cores of this process there."""
        return cores(self.root / CPUS.relative_to("/"), self.root / GROUP.relative_to("/"))


def quota(system: System) -> Slow | None:
    """A quota of the control group that is smaller than the cores."""
    found = system.cores()
    if found.quota is None or found.quota >= found.physical:
        return None
    return Slow(
        check="quota",
        level="slow",
        text=f"a CPU quota of {found.quota:g} of {found.physical} cores",
        advice="Raise the container's CPU limit (--cpus, resources.limits.cpu) to whole cores.",
    )


def throttled(system: System) -> Slow | None:
    """Periods in which the control group had used its quota and was stopped."""
    facts = dict(line.split() for line in system.text("sys/fs/cgroup/cpu.stat").splitlines() if len(line.split()) == 2)
    periods, stopped = int(facts.get("nr_periods", 0)), int(facts.get("nr_throttled", 0))
    if not periods or stopped < THROTTLED_LEAST * periods:
        return None
    return Slow(
        check="throttled",
        level="slow",
        text=f"the CPU quota stopped this container in {stopped / periods:.0%} of its periods",
        advice="Raise the CPU limit, or set --threads below it.",
    )


def hyperthreads(system: System) -> Slow | None:
    """Two CPUs of a core."""
    found = system.cores()
    if found.logical == found.physical:
        return None
    return Slow(
        check="hyper-threads",
        level="note",
        text=f"{found.logical} CPUs are hyper-threads of {found.physical} cores",
        advice="Nothing to do: quire takes one thread per core; more --threads are slower.",
    )


def nodes(system: System) -> Slow | None:
    """Memory in several places."""
    count = len(system.glob("sys/devices/system/node/node[0-9]*"))
    if count < 2:
        return None
    return Slow(
        check="numa",
        level="note",
        text=f"memory is in {count} NUMA nodes; a core reads another node's memory at about half the speed",
        advice="Small models: numactl --cpunodebind=0 --membind=0 quire serve ..., one server per node.",
    )


def governor(system: System) -> Slow | None:
    """Processors that are kept at low clocks."""
    folders = system.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq")
    saving = [
        path
        for path in folders
        if system.text(f"{path}/scaling_governor") == "powersave"
        and (
            system.text(f"{path}/scaling_driver") not in OWN_GOVERNORS
            or system.text(f"{path}/energy_performance_preference") == "power"
        )
    ]
    if not saving:
        return None
    return Slow(
        check="governor",
        level="slow",
        text=f"{len(saving)} of {len(folders)} CPUs are kept at low clocks (powersave)",
        advice="sudo cpupower frequency-set -g performance, or powerprofilesctl set performance.",
    )


def huge_pages(system: System) -> Slow | None:
    """Weights on small pages."""
    if "[never]" not in system.text("sys/kernel/mm/transparent_hugepage/enabled"):
        return None
    return Slow(
        check="huge-pages",
        level="slow",
        text="transparent huge pages are off, so that weights lie on pages of 4 KiB",
        advice="echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    )


def swap(system: System) -> Slow | None:
    """Memory that was moved to a disk."""
    facts = {
        name: int(value.split()[0]) << 10
        for name, _, value in (line.partition(":") for line in system.text("proc/meminfo").splitlines())
        if value.split() and value.split()[0].isdigit()
    }
    used = facts.get("SwapTotal", 0) - facts.get("SwapFree", 0)
    if used < SWAP_LEAST:
        return None
    return Slow(
        check="swap",
        level="slow",
        text=f"{used / 2**30:.1f} GiB of swap are in use: weights that lie there are read from a disk for every token",
        advice="Close what takes memory, or choose a smaller model or --kv-cache-memory-bytes; then swapoff -a.",
    )


def others(system: System) -> Iterator[Slow]:
    """CPU time that other processes and other machines on the same host take while this one waits."""
    before = _times(system.text("proc/stat"))
    system.sleep(WATCH_SECONDS)
    after = _times(system.text("proc/stat"))
    spent = {name: after[name] - before.get(name, 0) for name in after}
    whole = sum(spent.values())
    count = system.text("proc/stat").count("\ncpu")
    if whole <= 0 or not count:
        return
    taken = count * (whole - spent["idle"] - spent["iowait"] - spent["steal"]) / whole
    if taken >= OTHERS_LEAST:
        yield Slow(
            check="others",
            level="slow",
            text=f"other processes take {taken:.1f} of {count} CPUs now",
            advice="Look with top; measure and serve when they have ended, or take fewer --threads.",
        )
    if spent["steal"] >= STOLEN_LEAST * whole:
        yield Slow(
            check="stolen",
            level="slow",
            text=f"the host gives {spent['steal'] / whole:.0%} of this virtual machine's CPU time to others",
            advice="Take an instance with cores of its own.",
        )


def _times(text: str) -> dict[str, int]:
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    line = next((line.split()[1:] for line in text.splitlines() if line.startswith("cpu ")), [])
    return dict(zip(names, map(int, line[: len(names)]), strict=False)) if len(line) >= len(names) else {}


def debug_build(debug: bool = hasattr(sys, "gettotalrefcount")) -> Slow | None:
    """A Python that counts all of its references."""
    if not debug:
        return None
    return Slow(
        check="python",
        level="slow",
        text="this Python is a debug build, which runs Python code some times slower",
        advice="Install quire into a Python without --with-pydebug.",
    )


def disk(system: System, folder: Path) -> Slow | None:
    """A disk that turns, or is elsewhere, under the folder of packed weights."""
    kind = _file_system(system.text("proc/mounts"), folder)
    if kind in REMOTE:
        where = f"on a network file system ({kind})"
    elif _turns(system, folder):
        where = "on a disk that turns"
    else:
        return None
    return Slow(
        check="disk",
        level="slow",
        text=f"{folder} is {where}: loads are as slow as it is",
        advice="Point XDG_CACHE_HOME and the model's folder at a local SSD.",
    )


def _file_system(mounts: str, folder: Path) -> str:
    """Kind of the file system that a folder is on."""
    found = [line.split()[1:3] for line in mounts.splitlines() if len(line.split()) > 2]
    above = [(where, kind) for where, kind in found if folder.is_relative_to(where)]
    return max(above, key=lambda each: len(each[0]), default=("", ""))[1]


def _turns(system: System, folder: Path) -> bool:
    there = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    device = there.stat().st_dev
    place = f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    return any(system.number(f"{place}/{part}queue/rotational") == 1 for part in ("", "../"))


def gpu_unused(system: System, torch: bool, triton: bool) -> Slow | None:
    """A GPU that Python packages are missing for."""
    if not system.glob("dev/nvidia[0-9]*") or (torch and triton):
        return None
    missing = "PyTorch" if not torch else "Triton"
    return Slow(
        check="gpu",
        level="slow",
        text=f"there is a GPU, and {missing} is missing, so that it is not used",
        advice="pip install 'quire[gpu]'",
    )


def slow_memory(read: float, count: int) -> Slow | None:
    """Memory that reads slowly for its cores; `read`: measured bytes/s of `count` threads together."""
    wanted = SLOW_READ * min(count, CHANNEL_CORES)
    if read >= wanted:
        return None
    return Slow(
        check="memory",
        level="slow",
        text=f"memory reads at {read / 1e9:.1f} GB/s, less than {wanted / 1e9:.0f} GB/s that {count} cores could use",
        advice="A single memory module (add a second one), a small virtual machine, or busy neighbours.",
    )


def units(system: System, built: Sequence[str]) -> Slow | None:
    """A build without the unit for this processor. `built`: units that run here, best first; () = no extension."""
    if not built:
        return Slow(
            check="kernels",
            level="slow",
            text="the native kernels were not built: only the slow reference runs",
            advice="Install g++ 12 or newer (apt-get install g++), and install quire again.",
        )
    flags = set(system.text("proc/cpuinfo").replace(":", " ").split())
    best = next((unit for unit, needed in FLAGS.items() if needed <= flags), "")
    if not best or any(unit in built for unit in BETTER_OR_EQUAL[best]):
        return None
    return Slow(
        check="kernels",
        level="slow",
        text=f"the processor has {best}, and the installed kernels are for {built[0]} at most",
        advice="Install a wheel, or build with all units: pip install -C cmake.define.QUIRE_UNITS=all .",
    )


def slow_things(
    system: System, packages: Mapping[str, bool], built: Sequence[str], folder: Path | None = None
) -> list[Slow]:
    """Everything that the system's files say, what costs speed first. `packages`: whether torch and triton are here;
    `built`: units of the native extension that run; `folder`: where packed weights are kept, by default the cache."""
    single = [
        units(system, built),
        quota(system),
        throttled(system),
        governor(system),
        huge_pages(system),
        swap(system),
        debug_build(),
        disk(system, cache_folder() if folder is None else folder),
        gpu_unused(system, packages["torch"], packages["triton"]),
        hyperthreads(system),
        nodes(system),
    ]
    found = [*(each for each in single if each is not None), *others(system)]
    return sorted(found, key=lambda each: each.level != "slow")
