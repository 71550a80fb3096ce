"""A process that works on what is trusted with nothing, and that the kernel bounds.

It runs a program of this package, `script`, with a few modules and the standard library alone. Frames on a socket are
JSON behind their length, those to the process also behind seconds of CPU time, at whose end a signal ends it. What
follows the first line of a reply is the reply's "text", as it is: reading 8 MiB of JSON would keep the interpreter's
lock for 70 ms. The first frame from it says that it is ready. The end of the socket ends the process, so it outlives
nobody.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quire.core.errors import Unavailable

WALL_SECONDS = 10.0
"""Time for an answer, a start included: many times the budgets of CPU time, as processors may be shared."""
MAX_REPLY = 256 << 20
"""Longest message from a process, in bytes."""
HEAD = struct.Struct("!Id")
"""Of a message to a process: its length, and seconds of CPU time."""
_START = (
    "import os, runpy, sys; sys.path += sys.argv[2].split(os.pathsep); runpy.run_path(sys.argv[1], run_name='__main__')"
)


def encoded(job: Mapping[str, Any]) -> bytes:
    """`job` as a frame has it, by the faster of two writers where it may have it."""
    try:
        return msgspec.json.encode(job)
    except (UnicodeError, OverflowError, TypeError):  # half a surrogate pair, a large integer
        return json.dumps(job, ensure_ascii=False).encode("utf-8", "surrogatepass")


class ProcessEnded(Exception):
    """A process is gone; not by its bound of CPU time, as `code` says."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


class CpuTimeExceeded(Exception):
    """A process took its seconds of CPU time and was ended."""


class ReplyTooLarge(Exception):
    """A reply is longer than `MAX_REPLY`."""


@dataclass(frozen=True)
class Program:
    """What a process runs: `script` with `modules`, told `bounds`. `name`: what it is called where it does not."""

    name: str
    script: Path
    modules: Sequence[str]
    bounds: Sequence[int]


class BoundedProcess:
    """One process and the socket to it."""

    def __init__(self, program: Program) -> None:
        """Start the process and wait until it is ready; `Unavailable` when it does not start."""
        ours, theirs = socket.socketpair()
        specs = (importlib.util.find_spec(name) for name in program.modules)
        folders = {str(Path(spec.origin).parent.parent) for spec in specs if spec is not None and spec.origin}
        command = [sys.executable, "-I", "-S", "-c", _START, str(program.script), os.pathsep.join(sorted(folders))]
        command += map(str, program.bounds)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # Ctrl-C is for the one that started it
            )
        except OSError as error:
            ours.close()
            raise Unavailable(f"{program.name} does not start: {error.strerror}") from None
        finally:
            theirs.close()
        self._socket = ours
        try:
            self._read_frame(time.monotonic() + WALL_SECONDS)
        except OSError:  # a timeout is one
            self.close()
            raise Unavailable(f"{program.name} does not start: it ended with code {self._process.returncode}") from None

    def exchange(self, data: bytes, seconds: float, wall: float = WALL_SECONDS) -> Mapping[str, Any]:
        """The reply to `data`, for which it has `seconds` of CPU time.

        `TimeoutError` when none comes within `wall` seconds, `ReplyTooLarge`; `CpuTimeExceeded` and `ProcessEnded`
        when the process is gone.
        """
        end = time.monotonic() + wall
        try:
            self._socket.settimeout(wall)
            self._socket.sendall(HEAD.pack(len(data), seconds) + data)
            line, more, text = self._read_frame(end).partition(b"\n")
        except TimeoutError:
            raise
        except OSError:
            self.close()
            if self._process.returncode == -signal.SIGPROF:
                raise CpuTimeExceeded from None
            raise ProcessEnded(self._process.returncode) from None
        reply: dict[str, Any] = json.loads(line.decode("utf-8", "surrogatepass"))
        if more:
            reply["text"] = text.decode("utf-8", "surrogatepass")
        return reply

    def _read_frame(self, end: float) -> bytes:
        """A message, whole by `end`; an `OSError` when it does not come."""
        size = int.from_bytes(self._read(4, end), "big")
        if size > MAX_REPLY:
            raise ReplyTooLarge
        return self._read(size, end)

    def _read(self, size: int, end: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(max(end - time.monotonic(), 0.001))
            part = self._socket.recv(min(size - len(data), 1 << 20))
            if not part:
                raise ConnectionResetError
            data += part
        return bytes(data)

    def close(self) -> None:
        """End the process at once."""
        self._socket.close()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # with what it forked
        self._process.wait()

    def forget(self) -> None:
        """Forget the process in a fork of the process that started this one: leave it to that."""
        self._socket.close()
        self._process.returncode = 0


@dataclass(frozen=True)
class JobResult:
    """Result of a job: its reply, None where it exceeded a bound, and the CPU time it took.

    `spent`: the bound was that of CPU time; else memory or the depth of the stack.
    """

    reply: Mapping[str, Any] | None
    cpu: float
    spent: bool = False


class JobProcess(BoundedProcess):
    """One that does jobs by `quire.text.fork_server`."""

    def do(self, data: bytes, seconds: float, wall: float = WALL_SECONDS) -> JobResult:
        """What became of the job `data`, for which there are `seconds` of CPU time; raises as `exchange` does."""
        told = self.exchange(data, seconds, wall)
        return JobResult(told.get("reply"), float(told["cpu"]), told.get("ended") == -signal.SIGPROF)
