"""An engine in its own process, so that the server's event loop and the engine's steps never wait for each other."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, EngineFailure, ModelError, QuireError
from quire.core.files import LoadProgress
from quire.core.offload import FLUSH_SECONDS
from quire.core.request import Request
from quire.engine.client import (
    RANK_KILLED,
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
from quire.engine.processes.channel import Channel, LocalChannel
from quire.parallel.launch import END_SECONDS


class ProcessEngine:
    """`EngineClient` over a channel to a process; one thread may submit and abort while another polls."""

    def __init__(
        self,
        config: EngineConfig,
        progress: LoadProgress | None = None,
        given_up: Callable[[], bool] = lambda: False,
        start: Callable[[bytes], Channel] = LocalChannel,
    ) -> None:
        """`start`: a process that is told such a line. `EngineFailure` once `given_up` says so while the model is being
        loaded."""
        config.validate()
        self._given_up = given_up
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode
        self._closed = self._loaded = False
        self._end_seconds = END_SECONDS + (FLUSH_SECONDS if config.tiers.any else 0)
        self.channel = start(msgspec.json.encode(config))
        try:
            self._info = self._wait_until_loaded(progress)
            self._loaded = True
        except BaseException:
            self.close()
            raise

    @property
    def info(self) -> EngineInfo:
        """Facts about the loaded model."""
        return self._info

    @property
    def ready(self) -> bool:
        """Always: nothing starts it again."""
        return True

    def restart(self) -> None:
        """Nothing starts it again."""
        raise EngineFailure("nothing starts this engine again")

    def submit(self, request: Request) -> None:
        """Send a request; a refusal comes back as an output with an error."""
        self._send(Submit(request))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Send an abort, of all or of one sequence; unknown ids are ignored."""
        self._send(Abort(request_id, index))

    def pause(self, request_id: str) -> bool:
        """Never: nothing here keeps what came of a request."""
        return False

    def resume(self, request_id: str) -> None:
        """Nothing was paused."""

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
            raise _error_of(message)
        raise EngineFailure(f"unexpected message {type(message).__name__} from the engine")

    def kill(self) -> None:
        """End the process now. If it still listens to signals, it writes first where its threads are."""
        self.channel.kill()

    def cpu_wait(self) -> float:
        """Seconds for which the process wanted a processor and had none, so far; 0 where that is not known."""
        return self.channel.cpu_wait()

    def close(self) -> None:
        """End the process; one that runs gets seconds for what it saves: a packed cache, blocks for a store."""
        if not self._closed:
            self._closed = True
            self.channel.close(self._end_seconds if self._loaded else 0)

    def _send(self, message: ToEngine) -> None:
        if self._closed:
            raise EngineFailure("the engine process is not running")
        self.channel.send(self._encode(message))

    def _receive(self, timeout: float) -> FromEngine | None:
        data = self.channel.receive(timeout)
        if data is None:
            return None
        try:
            message: FromEngine = self._decode(data)
        except UNREADABLE as error:
            raise EngineFailure(f"the engine process sent what cannot be read: {error}") from None
        return message

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


def _error_of(failed: Failed) -> QuireError:
    kinds: dict[str, type[QuireError]] = {e.kind: e for e in (ModelError, ConfigError)} | {RANK_KILLED: EngineKilled}
    return kinds.get(failed.kind, EngineFailure)(failed.message)
