"""What a row says of this machine, this quire and the time: filled in by whoever measures."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import quire
from quire.core.machine import cores, processor
from quire.figures.schema import RowEngine, RowMachine

STANDS_ON = ("torch", "numpy", "tokenizers", "triton")


def this_machine(limits: dict[str, float] | None = None) -> RowMachine:
    """The processor, what this process may use of it, and its `limits`, measured by the caller."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return RowMachine(
        name=processor(),
        cores=cores().physical,
        memory_bytes=memory,
        system=f"{platform.system()} {platform.release()}",
        limits=limits or {},
    )


def this_engine() -> RowEngine:
    """quire as it runs here, and what it stands on."""
    versions = {"python": platform.python_version()}
    for name in STANDS_ON:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return RowEngine(name="quire", version=quire.__version__, commit=_commit(), versions=versions)


def now() -> str:
    """ISO 8601, UTC, whole seconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _commit() -> str:
    """Commit of the checkout this package lies in; "" where it is none, with a + where files differ from it."""
    here = Path(__file__)
    if not _git(here.parent, "ls-files", here.name):
        return ""  # installed, perhaps into a folder of somebody else's checkout
    return _git(here.parent, "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*")


def _git(folder: Path, *words: str) -> str:
    try:
        found = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
