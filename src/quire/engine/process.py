"""An engine in its own process, so that the server's event loop and the engine's steps never wait for each other."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile

import msgspec
import zmq

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, EngineFailure, ModelError, QuireError
from quire.core.progress import LoadProgress
from quire.core.request import Request
from quire.engine.client import (
    Abort,
    ChangeAdapter,
    EngineInfo,
    Failed,
    FromEngine,
    Loading,
    Ready,
    Shutdown,
    StepReport,
    Submit,
    ToEngine,
)

SHUTDOWN_SECONDS = 2.0
MAX_FRAME = 64 << 20


class ProcessEngine:
    """`EngineClient` over two sockets in a private directory; one thread may submit and abort while another polls."""

    def __init__(self, config: EngineConfig, progress: LoadProgress | None = None) -> None:
        config.validate()
        self._directory = tempfile.mkdtemp(prefix="quire-")  # mode 0700: only this user can connect
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._to = context.socket(zmq.PUSH)
        self._from = context.socket(zmq.PULL)
        self._from.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        for socket in (self._to, self._from):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
        inbox, outbox = f"ipc://{self._directory}/to", f"ipc://{self._directory}/from"
        self._to.bind(inbox)
        self._from.bind(outbox)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode
        self._process = subprocess.Popen(
            [sys.executable, "-m", "quire.engine.worker", inbox, outbox], stdin=subprocess.PIPE
        )
        self._closed = False
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(msgspec.json.encode(config) + b"\n")
            self._process.stdin.flush()
            self._info = self._wait_until_loaded(progress)
        except BaseException:
            self.close()
            raise

    @property
    def info(self) -> EngineInfo:
        """Facts about the loaded model."""
        return self._info

    def submit(self, request: Request) -> None:
        """Send a request; a refusal comes back as an output with an error."""
        self._send(Submit(request))

    def abort(self, request_id: str) -> None:
        """Send an abort; unknown ids are ignored."""
        self._send(Abort(request_id))

    def change_adapter(self, name: str, folder: str) -> None:
        """Ask for a LoRA adapter to be loaded, or unloaded where `folder` is empty."""
        self._send(ChangeAdapter(name, folder))

    def poll(self, timeout: float) -> StepReport | None:
        """The next step's report, or None after `timeout` seconds. EngineFailure when the process is gone."""
        message = self._receive(timeout)
        if message is None or isinstance(message, StepReport):
            return message
        if isinstance(message, Failed):
            raise EngineFailure(message.message)
        raise EngineFailure(f"unexpected message {type(message).__name__} from the engine")

    def close(self) -> None:
        """Stop the process, by force after two seconds, and remove the sockets."""
        if self._closed:
            return
        self._closed = True
        if self._process.poll() is None:
            with contextlib.suppress(zmq.Again):  # a process that is just ending has no ear any more
                self._to.send(self._encode(Shutdown()), zmq.NOBLOCK)
        try:
            self._process.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._to.close()
        self._from.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _send(self, message: ToEngine) -> None:
        if self._closed or self._process.poll() is not None:
            raise EngineFailure("the engine process is not running")
        self._to.send(self._encode(message), zmq.NOBLOCK)

    def _receive(self, timeout: float) -> FromEngine | None:
        if self._from.poll(int(timeout * 1000)):
            message: FromEngine = self._decode(self._from.recv())
            return message
        code = self._process.poll()
        # A last message may still be under way when the process has already ended.
        if code is not None and not self._from.poll(100):
            raise EngineFailure(f"the engine process ended with exit code {code}")
        return None

    def _wait_until_loaded(self, progress: LoadProgress | None) -> EngineInfo:
        while True:
            message = self._receive(0.1)
            if isinstance(message, Ready):
                return message.info
            if isinstance(message, Loading) and progress is not None:
                progress(message.done, message.total, message.what)
            if isinstance(message, Failed):
                raise _error_of(message)


def _error_of(failed: Failed) -> QuireError:
    kinds: dict[str, type[QuireError]] = {e.kind: e for e in (ModelError, ConfigError)}
    return kinds.get(failed.kind, EngineFailure)(failed.message)
