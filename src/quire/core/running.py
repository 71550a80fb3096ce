"""Servers that run on this machine: each keeps a file about itself while it runs, which others find it by."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from quire.core.machine import cache_folder


class RunningServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server of this user's. `started`: seconds since 1970. `patience`: seconds that it lets requests finish."""

    pid: int
    address: str
    models: tuple[str, ...]
    started: float
    version: str = ""
    patience: float = 30.0


def folder() -> Path:
    """Where the files are."""
    return cache_folder() / "run"


@contextmanager
def registered(server: RunningServer) -> Iterator[None]:
    """Have `servers` find this process meanwhile; nothing where the folder cannot be written.

    The file is locked while the process lives, so that one that a killed server left behind is known by that.
    """
    path = folder() / f"{server.pid}.json"
    handle = -1
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".tmp")
        handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(handle, msgspec.json.encode(server))
        part.replace(path)  # once it is locked and whole
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        if handle >= 0:
            os.close(handle)


def servers() -> list[RunningServer]:
    """Servers that run, the oldest first; what others left is removed. A registered process must not call it."""
    found = []
    for path in folder().glob("*.json"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            if _locked(path):
                found.append(msgspec.json.decode(path.read_bytes(), type=RunningServer))
            else:
                path.unlink(missing_ok=True)
    return sorted(found, key=lambda each: each.started)


def _locked(path: Path) -> bool:
    """Whether the process that wrote the file lives."""
    with path.open("rb+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def memory_of(pid: int) -> int:
    """Bytes of memory that a process and those that it started have (RSS); 0 where the system does not tell."""
    total, left = 0, [pid]
    while left:
        each = left.pop()
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            for task in Path(f"/proc/{each}/task").iterdir():
                left += map(int, (task / "children").read_text().split())
    return total


def ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie that its parent has not asked for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return False


def uptime(server: RunningServer) -> float:
    """Seconds since it began to serve."""
    return max(0.0, time.time() - server.started)
