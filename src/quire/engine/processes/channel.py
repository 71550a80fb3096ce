"""The way to an engine's process and back: two sockets in a private directory, or a link to the agent of a host."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from typing import Protocol

import msgspec
import zmq

from quire.core.errors import ConfigError, EngineFailure
from quire.core.machine import cpu_wait
from quire.engine.client import EngineKilled, Interrupted, WorkerStart
from quire.parallel.launch import DATA, LOST, Kill, Launch, Process, ProcessExited, order
from quire.parallel.link import Link
from quire.parallel.wire import ConnectionDropped

WORKER = "quire.engine.processes.worker"
"""What the process runs."""
DUMP_SECONDS = 0.3
"""That it gets to write where its threads are."""


class Channel(Protocol):
    """Messages in order. One thread may send while another receives."""

    def send(self, message: bytes) -> None:
        """Never waits. `EngineFailure` when nobody gets it."""

    def receive(self, timeout: float) -> bytes | None:
        """The next message, or None after `timeout` seconds. `EngineFailure` when the process is gone, saying how."""

    def kill(self) -> None:
        """End the process now. If it still listens to signals, it writes first where its threads are."""

    def cpu_wait(self) -> float:
        """Seconds for which the process wanted a processor and had none, so far; 0 where that is not known."""

    def close(self, seconds: float) -> None:
        """End the process, which has so many seconds to save what it wants to keep. At most once."""


class LocalChannel:
    """A process of this host, started with `line`; it ends with this one."""

    def __init__(self, line: bytes, shards: int | None = None) -> None:
        """`shards`: a descriptor of memory that replicas share."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._to = context.socket(zmq.PUSH)
        self._from = context.socket(zmq.PULL)
        self._directory = tempfile.mkdtemp(prefix="quire-")  # mode 0700: only this user can connect
        inbox, outbox = f"ipc://{self._directory}/to", f"ipc://{self._directory}/from"
        try:
            for socket, address in ((self._to, inbox), (self._from, outbox)):
                socket.set_hwm(0)
                socket.setsockopt(zmq.LINGER, 0)
                socket.bind(address)
        except zmq.ZMQError as error:
            self._clean_up()
            raise ConfigError(f"{self._directory}: no socket can be made there: {error}; set TMPDIR") from None
        files = () if shards is None else (shards,)
        told = WorkerStart(inbox, outbox, msgspec.Raw(line), *map(str, files))
        self.process = Process(WORKER, msgspec.json.encode(told), files)

    def send(self, message: bytes) -> None:
        """Implement `Channel`."""
        if self.process.ended() is not None:
            raise EngineFailure("the engine process is not running")
        try:
            self._to.send(message, zmq.NOBLOCK)
        except zmq.Again:  # its end of the socket closes a moment before it has ended
            raise EngineFailure("the engine process is not listening") from None

    def receive(self, timeout: float) -> bytes | None:
        """Implement `Channel`."""
        if self._from.poll(int(timeout * 1000)):
            return self._from.recv()
        code = self.process.ended()
        # A last message may still be under way when the process has already ended.
        if code is not None and not self._from.poll(100):
            raise _failure(code, f"the engine process {_end_of(code)}")
        return None

    def kill(self) -> None:
        """Implement `Channel`."""
        self.process.kill(signal.SIGUSR1)
        time.sleep(DUMP_SECONDS)
        self.process.kill()

    def cpu_wait(self) -> float:
        """Implement `Channel`."""
        return cpu_wait(self.process.pid)

    def close(self, seconds: float) -> None:
        """Implement `Channel`."""
        self.process.end(seconds)
        self._clean_up()

    def _clean_up(self) -> None:
        self._to.close()
        self._from.close()
        shutil.rmtree(self._directory, ignore_errors=True)


_KINDS: dict[int, type[EngineFailure]] = {-signal.SIGKILL: EngineKilled, LOST: Interrupted}
"""What ends of processes mean that mean something."""


def _failure(code: int, message: str) -> EngineFailure:
    return _KINDS.get(code, EngineFailure)(message)


def ended(failure: EngineFailure) -> ProcessExited:
    """`failure` of a channel, for whoever has the other end of a link."""
    codes = {kind: code for code, kind in _KINDS.items()}
    return ProcessExited(codes.get(type(failure), failure.exit_code), failure.message)


def _end_of(code: int) -> str:
    """How a process ended, by the code that `Popen` gives."""
    if code == LOST:
        return "ended because a host with other ranks is gone"
    if code >= 0:
        return f"ended with exit code {code}"
    hint = " (Linux does that when memory runs out; its log, dmesg, tells)" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


class RemoteChannel:
    """A process of the host `name`, which its agent starts with `line`; it ends with the link."""

    def __init__(self, link: Link, name: str, line: bytes) -> None:
        self._link, self._name = link, name
        self._decode = msgspec.msgpack.Decoder(ProcessExited).decode
        self._send(order(Launch("engine", line)))

    def send(self, message: bytes) -> None:
        """Implement `Channel`."""
        self._send(DATA + message)

    def receive(self, timeout: float) -> bytes | None:
        """Implement `Channel`."""
        try:
            said = self._link.receive(timeout)
        except ConnectionDropped as lost:
            raise self._gone(lost) from None
        if said is None or said[:1] == DATA:
            return said and said[1:]
        ended = self._decode(said[1:])
        raise _failure(ended.code, f"{self._name}: {ended.message}")

    def kill(self) -> None:
        """Implement `Channel`."""
        self._send(order(Kill()))

    def cpu_wait(self) -> float:
        """Implement `Channel`."""
        return 0.0

    def close(self, seconds: float) -> None:
        """Implement `Channel`."""
        self._link.close()

    def _send(self, message: bytes) -> None:
        try:
            self._link.send(message)
        except ConnectionDropped as lost:
            raise self._gone(lost) from None

    def _gone(self, lost: ConnectionDropped) -> Interrupted:
        return Interrupted(f"{self._name} is gone: {lost}")
