"""An engine in its own process, so that the server's event loop and the engine's steps never wait for each other."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import msgspec
import zmq

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, EngineFailure, ModelError, QuireError
from quire.core.progress import LoadProgress
from quire.core.request import Request
from quire.engine.client import (
    UNREADABLE,
    Abort,
    ChangeAdapter,
    EngineInfo,
    EngineKilled,
    Failed,
    FromEngine,
    Loading,
    Ready,
    ResetPrefixCache,
    StepReport,
    Submit,
    ToEngine,
)

WORKER = "quire.engine.worker"
"""What the process runs."""
END_SECONDS = 3.0
"""That a process may take to end by itself."""
DUMP_SECONDS = 0.3
"""That it gets to write where its threads are."""


class ProcessEngine:
    """`EngineClient` over two sockets in a private directory; one thread may submit and abort while another polls."""

    def __init__(
        self,
        config: EngineConfig,
        progress: LoadProgress | None = None,
        given_up: Callable[[], bool] = lambda: False,
        shards: int | None = None,
    ) -> None:
        """`EngineFailure` once `given_up` says so while the model is being loaded. `shards`: a descriptor of memory
        that replicas share."""
        self._shards = () if shards is None else (shards,)
        config.validate()
        self._given_up = given_up
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._to = context.socket(zmq.PUSH)
        self._from = context.socket(zmq.PULL)
        self._directory = tempfile.mkdtemp(prefix="quire-")  # mode 0700: only this user can connect
        self._process = self._start()
        self._closed = self._loaded = False
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(msgspec.json.encode(config) + b"\n")
            self._process.stdin.flush()
            self._info = self._wait_until_loaded(progress)
            self._loaded = True
        except BaseException:
            self.close()
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        """The process, in a session of its own: what Ctrl-C means is decided here, and it must not die of it."""
        inbox, outbox = f"ipc://{self._directory}/to", f"ipc://{self._directory}/from"
        try:
            for socket, address in ((self._to, inbox), (self._from, outbox)):
                socket.set_hwm(0)
                socket.setsockopt(zmq.LINGER, 0)
                socket.bind(address)
        except zmq.ZMQError as error:
            self._clean_up()
            raise ConfigError(f"{self._directory}: no socket can be made there: {error}; set TMPDIR") from None
        command = [sys.executable, "-m", WORKER, inbox, outbox, *map(str, self._shards)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, pass_fds=self._shards)

    @property
    def info(self) -> EngineInfo:
        """Facts about the loaded model."""
        return self._info

    @property
    def ready(self) -> bool:
        """Always: nothing starts it again."""
        return True

    def submit(self, request: Request) -> None:
        """Send a request; a refusal comes back as an output with an error."""
        self._send(Submit(request))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Send an abort, of all or of one sequence; unknown ids are ignored."""
        self._send(Abort(request_id, index))

    def change_adapter(self, name: str, folder: str) -> None:
        """Ask for a LoRA adapter to be loaded, or unloaded where `folder` is empty."""
        self._send(ChangeAdapter(name, folder))

    def reset_prefix_cache(self) -> None:
        """Ask for it; messages arrive in order, so requests that are submitted later come after it."""
        self._send(ResetPrefixCache())

    def poll(self, timeout: float) -> StepReport | None:
        """The next step's report, or None after `timeout` seconds. EngineFailure when the process is gone."""
        message = self._receive(timeout)
        if message is None or isinstance(message, StepReport):
            return message
        if isinstance(message, Failed):
            raise EngineFailure(message.message)
        raise EngineFailure(f"unexpected message {type(message).__name__} from the engine")

    def kill(self) -> None:
        """End the process now. If it still listens to signals, it writes first where its threads are."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(DUMP_SECONDS)
            self._process.kill()

    def close(self) -> None:
        """End the process and remove the sockets.

        Closing its input ends one that runs: it has nothing to save but a packed cache, which it is given seconds for.
        """
        if self._closed:
            return
        self._closed = True
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it is gone already
                self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS if self._loaded else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._clean_up()

    def _clean_up(self) -> None:
        self._to.close()
        self._from.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _send(self, message: ToEngine) -> None:
        if self._closed or self._process.poll() is not None:
            raise EngineFailure("the engine process is not running")
        try:
            self._to.send(self._encode(message), zmq.NOBLOCK)
        except zmq.Again:  # its end of the socket closes a moment before it has ended
            raise EngineFailure("the engine process is not listening") from None

    def _receive(self, timeout: float) -> FromEngine | None:
        if self._from.poll(int(timeout * 1000)):
            try:
                message: FromEngine = self._decode(self._from.recv())
            except UNREADABLE as error:
                raise EngineFailure(f"the engine process sent what cannot be read: {error}") from None
            return message
        code = self._process.poll()
        # A last message may still be under way when the process has already ended.
        if code is not None and not self._from.poll(100):
            failure = EngineKilled if -code == signal.SIGKILL else EngineFailure
            raise failure(f"the engine process {_end_of(code)}")
        return None

    def _wait_until_loaded(self, progress: LoadProgress | None) -> EngineInfo:
        while True:
            message = self._receive(0.1)
            if self._given_up():
                raise EngineFailure("the engine was given up while it was loading")
            if isinstance(message, Ready):
                return message.info
            if isinstance(message, Loading) and progress is not None:
                progress(message.done, message.total, message.what)
            if isinstance(message, Failed):
                raise _error_of(message)


def _end_of(code: int) -> str:
    """How a process ended, by the code that `Popen` gives."""
    if code >= 0:
        return f"ended with exit code {code}"
    hint = " (Linux does that when memory runs out; its log, dmesg, tells)" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def _error_of(failed: Failed) -> QuireError:
    kinds: dict[str, type[QuireError]] = {e.kind: e for e in (ModelError, ConfigError)}
    return kinds.get(failed.kind, EngineFailure)(failed.message)
