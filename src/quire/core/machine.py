"""What this process may use of the machine: cores, hyper-threads and quotas taken into account, and memory."""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import math
import os
import platform
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISVTX

from quire.core.config import cpu_set

CPUS = Path("/sys/devices/system/cpu")
GROUP = Path("/sys/fs/cgroup")
PR_SET_PDEATHSIG = 1
M_ARENA_MAX = -8

logger = logging.getLogger("quire.machine")


@dataclass(frozen=True)
class Cores:
    """`logical`: CPUs of the affinity mask; `physical`: cores they belong to; `quota`: CPUs' worth of time, or None."""

    logical: int
    physical: int
    quota: float | None

    @property
    def threads(self) -> int:
        """Threads for the kernels: one per physical core, not more than the quota pays for.

        Two hyper-threads share the vector units and the way to memory that one kernel thread fills; more threads than
        quota would all be stopped in the middle of a step.
        """
        return self.physical if self.quota is None else max(1, min(self.physical, math.floor(self.quota + 0.25)))

    def __str__(self) -> str:
        quota = "no quota" if self.quota is None else f"a quota of {self.quota:g} CPUs"
        return f"{self.physical} cores with {self.logical} CPUs in the affinity mask, {quota}"


def cores(cpus: Path = CPUS, group: Path = GROUP) -> Cores:
    """Cores of this process now."""
    mine = cpu_set()
    siblings = {_siblings(cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list", cpu) for cpu in mine}
    return Cores(len(mine), len(siblings), _quota(group))


def largest_cache(cpus: Path = CPUS) -> int:
    """Bytes of the processor's largest cache, whoever shares it; 0 where the system does not tell."""
    found = [0]
    for path in cpus.glob("cpu0/cache/index*/size"):
        try:
            size = path.read_text().strip()
            found.append(int(size.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(size[-1:], 0))
        except (OSError, ValueError):
            continue
    return max(found)


def processor(*more: str) -> str:
    """The processor's name, followed by the fields `more` of /proc/cpuinfo, which tell its makes apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    facts = dict(line.split(":", 1) for line in lines[:40] if ":" in line)
    found = {name.strip(): value.strip() for name, value in facts.items()}
    known = " ".join(found[name] for name in ("model name", *more) if name in found)
    return known or platform.processor() or platform.machine()


def _siblings(path: Path, cpu: int) -> str:
    """What names the core of a CPU; the CPU itself where the system does not tell."""
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)


def _quota(group: Path) -> float | None:
    """CPUs' worth of time of the control group (version 2 or 1), or None."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((group / file).read_text() for file in files).split()
            return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return None


def available_memory(group: Path = GROUP) -> int:
    """Bytes this process may still take: the machine's available memory, or what its control group leaves if less."""
    # Where the system does not tell what is free (macOS): half of what there is.
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        available = 1024 * _amounts(meminfo.read_text().replace(" kB", ""))["MemAvailable:"]
    for limit, used, stat, prefix in (
        ("memory.max", "memory.current", "memory.stat", ""),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_"),
    ):
        try:
            most, taken = int((group / limit).read_text()), int((group / used).read_text())
            pages = _amounts((group / stat).read_text()) if (group / stat).exists() else {}
        except (OSError, ValueError):  # no such group, or "max"
            continue
        # Cached pages of files count as taken, and go where memory is wanted.
        cached = sum(pages.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
        available = min(available, most - taken + min(cached, taken))
    return max(0, available)


def _amounts(text: str) -> dict[str, int]:
    """Lines of a name and a number."""
    return {name: int(value) for name, value in (line.split() for line in text.splitlines())}


def raise_file_limit() -> None:
    """Open as many files as the system lets this process: the soft limit is often 1024, and a connection is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # macOS has a lower limit of its own
        logger.warning("at most %d files can be open, connections among them: %s", soft, error)


def memory_file() -> int:
    """A file in memory that is empty and has no name; the descriptor is the caller's."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("quire")
    with tempfile.TemporaryFile() as named:
        return os.dup(named.fileno())


def cache_folder() -> Path:
    """Where quire keeps what it made or found out for later starts: $XDG_CACHE_HOME/quire, or else ~/.cache/quire."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "quire"


def foreign(path: Path) -> str:
    """Why what is kept at `path` may be another user's, and is not to be believed; "" where it is this user's alone.

    `OSError` where there is nothing.
    """
    for place, forbidden in ((path, 0o022), (path.parent, 0o002)):
        status = place.stat()
        if status.st_uid not in (os.getuid(), 0):
            return f"{place} belongs to another user"
        if status.st_mode & forbidden and not status.st_mode & S_ISVTX:
            return f"others may write {place}: chmod go-w"
    return ""


def cpu_wait(pid: int) -> float:
    """Seconds for which threads of a process were ready to run while others had the processors, all together (Linux's
    schedstat); 0 where the kernel does not say. A thread that waits holds up those that wait for its share of a step.
    """
    waited = 0
    with suppress(OSError, ValueError, IndexError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            waited += int((task / "schedstat").read_text().split()[1])
    return waited / 1e9


@contextmanager
def uncollected(forever: bool) -> Iterator[None]:
    """Run without looking for garbage meanwhile; `forever`: what there is then is never looked through again.

    Imports and loads make half a million objects that stay. Looking through them as they come took a sixth of the time
    of all imports, and afterwards each full search would stop the steps for a tenth of a second.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if forever:
            gc.freeze()
            atexit.register(gc.unfreeze)  # the interpreter's last search is to find native objects in cycles
        if was:
            gc.enable()


def end_with_parent(how: signal.Signals = signal.SIGTERM) -> None:
    """Have the system send this process a signal when the thread that started it ends, however it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, how)


def trim_heap() -> None:
    """Give freed memory back to the system where the C library can (glibc).

    It keeps freed pieces of up to 32 MB for itself: a load of 512 MiB of bf16 layer by layer left 270 MiB of them.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def share_heaps() -> None:
    """Have all threads of this process take memory from two heaps of the C library (glibc); call it before they start.

    It makes eight a core otherwise, and each keeps what its largest text needed: after 2,000 requests of up to half a
    megabyte a server had 94 MiB in place of 148.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(M_ARENA_MAX, 2)
