"""How a process of a model comes to be, is watched and ended: here, or on another host by the agent there.

What a process is told at its start is one line on its standard input, which is then its death pipe.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from typing import Protocol

import msgspec

from quire.parallel.link import Link
from quire.parallel.prestart import started
from quire.parallel.wire import ConnectionDropped

END_SECONDS = 3.0
"""That a process may take to end by itself."""
POLL_SECONDS = 1.0
LOST = 75
"""The exit code of a process because a host that it needs is gone, and what counts as that of one on such a host."""


class Launched(Protocol):
    """A process, wherever it runs. Exit codes are those of `Popen`."""

    def ended(self) -> int | None:
        """Return the exit code, once it has ended."""

    def wait(self) -> int:
        """Wait for the exit code, when it has ended."""

    def end(self) -> None:
        """Let it end by itself, or end it after a moment; returns when it has ended."""


class Process:
    """A process of a module, as `started` has it."""

    def __init__(self, module: str, line: bytes, files: Sequence[int] = ()) -> None:
        """`line`: what it reads first; `files`: descriptors that it has too."""
        self._popen = started(module, files)
        assert self._popen.stdin is not None
        self._stdin, self.pid = self._popen.stdin, self._popen.pid
        with contextlib.suppress(BrokenPipeError):  # it has ended, which whoever watches it finds out
            self._stdin.write(line + b"\n")
            self._stdin.flush()

    def ended(self) -> int | None:
        """Implement `Launched`."""
        return self._popen.poll()

    def wait(self) -> int:
        """Implement `Launched`."""
        return self._popen.wait()

    def kill(self, signal: int | None = None) -> None:
        """End it now, or send it another signal."""
        with contextlib.suppress(ProcessLookupError):
            self._popen.kill() if signal is None else self._popen.send_signal(signal)

    def end(self, seconds: float = END_SECONDS) -> None:
        """Implement `Launched`; `seconds`: the moment."""
        with contextlib.suppress(OSError):  # it is gone already
            self._stdin.close()
        try:
            self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


class Launch(msgspec.Struct, frozen=True, tag="launch"):
    """Message to an agent: run this kind of process, told `line`. The link lives as long as the process, and it with
    the link.

    `kind`: "engine", whose messages then go over the link, or "ranks": those of one engine that belong on its host.
    """

    kind: str
    line: bytes


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """Message to an agent: end the process now."""


class ProcessExited(msgspec.Struct, frozen=True, tag="ended"):
    """Message from an agent: the process has ended, with a code as `Popen` has it, as `message` says."""

    code: int
    message: str = ""


Order = Launch | Kill
ORDER, DATA = b"o", b"d"
"""The first byte of a message on a link to an agent: for the agent, or for the process (or from it)."""
_encode = msgspec.msgpack.Encoder().encode


def order(message: Order | ProcessExited) -> bytes:
    """An order, or what came of it, as bytes of a link."""
    return ORDER + _encode(message)


class RemoteLauncher:
    """Processes without messages that an agent runs; `link`: to the agent, for these alone."""

    def __init__(self, link: Link, kind: str, line: bytes) -> None:
        self._link, self._code = link, None if self._ask(link, kind, line) else LOST
        self._decode = msgspec.msgpack.Decoder(ProcessExited).decode

    @staticmethod
    def _ask(link: Link, kind: str, line: bytes) -> bool:
        try:
            link.send(order(Launch(kind, line)))
        except ConnectionDropped:
            return False
        return True

    def ended(self) -> int | None:
        """Implement `Launched`; known once `wait` has it, in another thread."""
        return self._code

    def wait(self) -> int:
        """Implement `Launched`."""
        while self._code is None:
            try:
                said = self._link.receive(POLL_SECONDS)
            except ConnectionDropped:
                self._code = LOST
            else:
                self._code = None if said is None else self._decode(said[1:]).code
        return self._code

    def end(self) -> None:
        """Implement `Launched`: it ends with its link."""
        self._link.close()
