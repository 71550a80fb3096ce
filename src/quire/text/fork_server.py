"""The loop of a process that does each job in a fork of its own, which the kernel bounds.

What a job exceeds ends the fork alone: the process itself, which has loaded all that jobs need, does the next one a
millisecond later. `quire.text.bounded_process.JobProcess` is the other end. Frames from here are {"cpu": seconds,
"reply": what the job gave}, or "ended": how its fork ended without a reply (below 0: by a signal; -SIGPROF: its CPU
time was spent).
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

HEAD = struct.Struct("!Id")
"""Of a message to the process: its length, and seconds of CPU time."""
NO_MEMORY = 3
"""Exit code of a fork that had no memory left."""
LONG, SOON_MS, GIVING_WAY = 0.5, 100, 15
"""A job that may take more than `LONG` seconds, and has taken `SOON_MS`, gets this niceness: what it is asked beside, a
model that others wait for, say, goes on as if it had the processors for itself."""
Job = Callable[[bytes], dict[str, Any]]


def serve(do: Job, memory: int, share: int = 0) -> None:
    """Answer jobs until the socket, file descriptor 0, ends.

    A fork may have `memory` bytes beside those of the process at rest, and `share` for each byte of its job.
    """
    at_rest = _address_space()
    send(b"{}")
    while True:
        data, seconds = receive()
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ours)
            _be_bounded(None if at_rest is None else at_rest + memory + share * len(data), seconds)
            _answer(do, data, theirs)
        os.close(theirs)
        _pass_on(child, ours, seconds > LONG)
        os.close(ours)


def _address_space() -> int | None:
    """Bytes of address space in use, or None where the kernel does not tell (macOS, which bounds none)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None


def _be_bounded(memory: int | None, seconds: float) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    for name in ("RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_CORE"):
        resource.setrlimit(getattr(resource, name), (0, 0))
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _answer(do: Job, data: bytes, to: int) -> None:
    """Do the job in this fork, which ends with it."""
    code = 1
    try:
        reply = json.dumps(do(data), ensure_ascii=False).encode("utf-8", "surrogatepass")
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(to, reply)
        code = 0
    except MemoryError:
        code = NO_MEMORY
    finally:
        os._exit(code)


def _pass_on(child: int, ours: int, long: bool) -> None:
    """Send what `child` writes to the pipe `ours`, or how it ends. `long`: it may take long."""
    poll, parts = select.poll(), list[bytes]()
    poll.register(ours, select.POLLIN)
    poll.register(0, 0)  # its end is told all the same
    ready = dict(poll.poll(SOON_MS if long else None))
    if not ready:
        with suppress(OSError):  # it has just ended
            os.setpriority(os.PRIO_PROCESS, child, GIVING_WAY)
    while True:
        ready = ready or dict(poll.poll())
        if 0 in ready:
            os.kill(child, signal.SIGKILL)
            os._exit(0)
        part = os.read(ours, 1 << 20)
        if not part:
            break
        parts.append(part)
        ready = {}
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    head = f'{{"cpu": {usage.ru_utime + usage.ru_stime:.6f}, '.encode()
    whole = [b'"reply": ', *parts] if code == 0 else [f'"ended": {code}'.encode()]
    send(b"".join([head, *whole, b"}"]))


def receive() -> tuple[bytes, float]:
    """A message, and the seconds of CPU time that there are for it."""
    size, seconds = HEAD.unpack(_take(HEAD.size))
    return _take(size), seconds


def _take(size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(0, min(size - len(parts), 1 << 20))
        if not part:
            os._exit(0)
        parts += part
    return bytes(parts)


def send(data: bytes) -> None:
    """A frame on the socket."""
    _write(0, len(data).to_bytes(4, "big") + data)


def _write(to: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(to, rest) :]
