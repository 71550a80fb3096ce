"""The engine process: `python -m quire.engine.processes.worker`, started by `LocalChannel`, or before it is known what
for.

What it is told (`WorkerStart`) comes as one JSON line on standard input, which afterwards serves as a death pipe: when
it closes, the parent is gone and so is this process. Messages are msgpack of fixed schemas (no pickle).
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
import zmq

from quire.core.blame import Party, party
from quire.core.config import EngineConfig
from quire.core.errors import PartFailure, QuireError
from quire.core.machine import raise_file_limit, share_heaps, trim_heap, uncollected
from quire.core.offload import FLUSH_SECONDS
from quire.core.request import Output
from quire.engine.client import (
    RANK_KILLED,
    UNREADABLE,
    Abort,
    ChangeAdapter,
    Failed,
    FromEngine,
    Loading,
    Ready,
    ResetPrefixCache,
    StepReport,
    Submit,
    ToEngine,
    WorkerStart,
)
from quire.model.load.packed_folder import ask_ahead
from quire.parallel.launch import LOST

if TYPE_CHECKING:
    from quire.engine.engine import Engine
    from quire.model.offload.shared_host import Shards

logger = logging.getLogger("quire.engine")

ENGINE = "quire.engine.start"
"""Imported while the parent still imports what it needs to say what to load."""
IDLE_WAIT_MS = 1000
BEHIND_WAIT_MS = 5
"""Between copies of blocks to a store, and before the account of blocks is checked."""
PROGRESS_INTERVAL = 0.1
TRIM_EVERY = 10.0
"""Seconds between two times that freed memory is given back."""


class _Id(msgspec.Struct, frozen=True):
    id: str


class _Submitted(msgspec.Struct, tag="submit", frozen=True):
    """A `Submit` of whose request only the id is read."""

    request: _Id


_named = msgspec.msgpack.Decoder(_Submitted).decode


class Worker:
    """Moves messages between two sockets and an engine."""

    def __init__(self, inbox: str, outbox: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.inbox = context.socket(zmq.PULL)
        self.outbox = context.socket(zmq.PUSH)
        self.outbox.set_hwm(0)
        self.inbox.connect(inbox)
        self.outbox.connect(outbox)
        self._decode = msgspec.msgpack.Decoder(ToEngine).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._reported = self._trimmed = 0.0
        self._turn, self._left = threading.Lock(), False

    def send(self, message: FromEngine) -> None:
        """Hand a message to the edge; never waits."""
        self.outbox.send(self._encode(message))

    def progress(self, done: int, total: int, what: str) -> None:
        """Report the load, at most ten times a second."""
        now = time.monotonic()
        if now - self._reported >= PROGRESS_INTERVAL or done == total:
            self._reported = now
            self.send(Loading(done, total, what))

    def receive(self, engine: Engine, timeout_ms: int) -> list[Output]:
        """Apply all waiting messages; returns refusals."""
        refused = []
        while self.inbox.poll(timeout_ms):
            timeout_ms = 0
            data = self.inbox.recv()
            try:
                message = self._decode(data)
            except UNREADABLE as error:
                logger.error("a message that cannot be read was dropped: %s", error)
                refused += _refusals(data)
                continue
            if isinstance(message, Submit):
                output = engine.submit(message.request)
                if output is not None:
                    refused.append(output)
            elif isinstance(message, Abort):
                engine.abort(message.request_id, message.index)
            elif isinstance(message, ResetPrefixCache):
                engine.reset_prefix_cache()
            elif isinstance(message, ChangeAdapter):
                self.send(StepReport([], engine.stats(), (engine.adapting.change(message),)))
        return refused

    def loop(self, engine: Engine) -> NoReturn:
        """Step while there is work, wait for messages otherwise. Also reports after an abort, so that gauges fall."""
        more = False
        while True:
            idle = not engine.has_work
            self.inbox.poll((BEHIND_WAIT_MS if more or engine.unchecked else IDLE_WAIT_MS) if idle else 0)
            with self._turn:
                if self._left:
                    break
                outputs = self.receive(engine, 0)
                more = not engine.has_work and engine.tiering is not None and engine.tiering.write_behind()
                if engine.has_work:
                    outputs += engine.step()
                elif idle and not more:
                    self.check(engine)
                self.send(StepReport(outputs, engine.stats(), portable=engine.portable()))
        while True:
            time.sleep(IDLE_WAIT_MS)  # the process ends in another thread

    def check(self, engine: Engine) -> None:
        """Check the engine, part by part, until all is checked, a message comes, or this process is to end.

        Then freed memory goes back to the system: what steps of many shapes leave varies by 20 MiB.
        """
        engine.check(part=True)
        while engine.unchecked and not self._left and not self.inbox.poll(0):
            engine.check(part=True)
        if time.monotonic() - self._trimmed >= TRIM_EVERY:
            trim_heap()
            self._trimmed = time.monotonic()

    def leave(self, engine: Engine | None) -> None:
        """Take the engine from the loop, between steps, and let it keep what it may."""
        self._left = True
        if engine is not None and engine.tiering is not None and self._turn.acquire(timeout=FLUSH_SECONDS):
            engine.close()


def _refusals(data: bytes) -> list[Output]:
    """What ends the request of a `Submit` that cannot be read, if at least its id can: somebody waits for it."""
    try:
        named = _named(data)
    except UNREADABLE:
        return []
    error = PartFailure("admission: the engine could not read this request, which alone ended; the log has more")
    return [Output(request_id=named.request.id).fail(error)]


def die_with_parent(directory: Path, leave: Callable[[], None]) -> None:
    """Leave at once when standard input closes: nobody is there to read our results, or to remove the sockets."""
    # Not through sys.stdin: its lock, held by this thread, would break the interpreter's own shutdown.
    while os.read(0, 4096):
        pass
    shutil.rmtree(directory, ignore_errors=True)
    leave()
    packed_writing = sys.modules.get("quire.model.load.packed_writing")  # not imported only to find nothing
    if packed_writing is not None:
        packed_writing.finish_all()
    os._exit(0)


def main() -> int:
    """Load, serve, and report a failure as a message; the exit code is that of the error."""
    faulthandler.enable()  # a fault in native code says where it happened
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the watchdog asks before it kills
    for sig in (signal.SIGTERM, signal.SIGHUP):  # systemd sends them to us too, while the parent still drains
        signal.signal(sig, signal.SIG_IGN)
    raise_file_limit()
    share_heaps()
    gc.disable()  # as `uncollected`
    threading.Thread(target=importlib.import_module, args=(ENGINE,), daemon=True).start()
    line = sys.stdin.buffer.readline()
    gc.enable()
    if not line:
        os._exit(0)  # the parent left while we were starting
    told = msgspec.json.decode(line, type=WorkerStart)
    config, shards = msgspec.json.decode(told.config, type=EngineConfig), told.shards
    directory = Path(told.inbox.removeprefix("ipc://")).parent
    worker = Worker(told.inbox, told.outbox)
    engine: Engine | None = None
    shared: Shards | None = None
    threading.Thread(target=die_with_parent, args=(directory, lambda: worker.leave(engine)), daemon=True).start()
    try:
        ask_ahead(config.model)
        with uncollected(forever=True):
            from quire.engine.start import shards_of, start_engine

            shared = shards_of(config, int(shards)) if shards else None
            engine = start_engine(config, worker.progress, shared)
        worker.send(Ready(engine.info()))
        worker.loop(engine)
    except QuireError as error:
        killed = party(error) is Party.RANK and engine is not None and engine.executor.killed
        worker.send(Failed(error.message, RANK_KILLED if killed else error.kind, error.exit_code))
        return error.exit_code
    except Exception as error:
        if shared is not None and shared.lost:
            return LOST
        kind = RANK_KILLED if engine is not None and engine.executor.killed else "engine_error"
        if kind != RANK_KILLED:  # where this one noticed says nothing
            traceback.print_exc()
        worker.send(Failed(f"the engine failed: {type(error).__name__}: {error}", kind, 1))
        return 1


if __name__ == "__main__":
    sys.exit(main())
