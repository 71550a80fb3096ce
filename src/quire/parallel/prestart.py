"""Processes of modules, one of which may be started before anybody knows what to tell it.

It imports what it needs beside the imports of whoever tells it. So this file imports little.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

_waiting: dict[str, subprocess.Popen[bytes]] = {}
"""Module -> its process that was told nothing yet."""


def start_ahead(module: str) -> None:
    """Start a process of `module`, which the first `started` that asks for one gets, unless `drop_waiting` ends it."""
    _waiting[module] = _start(module, ())


def started(module: str, files: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """`python -m MODULE`, in a session of its own: what Ctrl-C means is decided here, and it must not die of it.

    `files`: descriptors that it has too.
    """
    found = _waiting.get(module)
    if found is not None and not files and found.poll() is None:
        del _waiting[module]
    else:
        found = _start(module, files)
    drop_waiting()
    return found


def drop_waiting() -> None:
    """End what was started ahead: nobody will tell it anything."""
    while _waiting:
        _, process = _waiting.popitem()
        with process:
            process.kill()


def _start(module: str, files: Sequence[int]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", module]
    return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=files, start_new_session=True)
