"""The flight recorder: an `EngineClient` around another, which writes down what goes in and what comes out.

Requests are written as they are handed over, so that those on which a machine dies are there; outputs once a sequence
has ended. A thread writes: whoever submits or polls never waits for the disk. Files are for their owner alone.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec.structs import replace

import quire
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.request import FinishReason, Output, Request
from quire.engine.client import EngineClient, EngineInfo, StepReport
from quire.engine.record.recording import (
    FILE,
    FORMAT,
    AdapterLine,
    EndLine,
    Line,
    LostLine,
    RequestLine,
    RunLine,
    without_content,
    without_pixels,
)

logger = logging.getLogger("quire.recorder")

FILES = 8
"""The folder's bytes are cut into so many files, the oldest of which makes room."""
MAX_PENDING = 32 << 20
"""Bytes of lines that may wait for the disk."""


def make_folder(folder: Path) -> None:
    """A folder for recordings, for this user alone where it is new; `ConfigError` where nothing can be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--record {folder}: {error.strerror}", param="record") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--record {folder}: cannot be written", param="record")


class Segments:
    """Lines in files of `folder`, written by a thread; together they have `limit` bytes at most, whoever wrote them.

    `head`: the first line of each file. Where the disk fails, that is logged, and nothing more is written.
    """

    def __init__(self, folder: Path, limit: int, head: Callable[[], Line]) -> None:
        self._folder, self._limit, self._size, self._head = folder, limit, limit // FILES, head
        self._run = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}"
        self._number = self._written = self._lost = self._pending = 0
        self._file = -1
        self._lines: deque[bytes] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._encode = msgspec.json.Encoder().encode
        self._thread = threading.Thread(target=self._work, name="quire-recorder", daemon=True)
        self._thread.start()

    def add(self, line: Line) -> None:
        """Have a line written; what is too much is counted instead."""
        data = self._encode(line) + b"\n"
        with self._wake:
            if self._closed or len(data) > self._size // 2 or self._pending + len(data) > MAX_PENDING:
                self._lost += 1
                return
            if self._lost:
                self._lines.append(self._encode(LostLine(lines=self._lost)) + b"\n")
                self._lost = 0
            self._pending += len(data)
            self._lines.append(data)
            self._wake.notify()

    def close(self) -> None:
        """Write what waits."""
        with self._wake:
            if self._lost and not self._closed:
                self._lines.append(self._encode(LostLine(lines=self._lost)) + b"\n")
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout=5.0)

    def _work(self) -> None:
        try:
            while lines := self._next():
                for data in lines:
                    self._write(data)
        except OSError as error:
            logger.error("--record %s: %s; nothing more is recorded", self._folder, error.strerror)
            with self._wake:
                self._closed = True
                self._lines.clear()
        finally:
            if self._file >= 0:
                os.close(self._file)

    def _next(self) -> list[bytes]:
        """What is to be written, once there is something; nothing at the end."""
        with self._wake:
            self._wake.wait_for(lambda: self._lines or self._closed)
            lines = list(self._lines)
            self._lines.clear()
            self._pending = 0
        return lines

    def _write(self, data: bytes) -> None:
        if self._file < 0 or self._written + len(data) > self._size:
            self._open()
        self._put(data)

    def _put(self, data: bytes) -> None:
        self._written += len(data)
        while data:
            data = data[os.write(self._file, data) :]

    def _open(self) -> None:
        """Begin the next file, when the oldest have made room for it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        paths = sorted(path for path in self._folder.iterdir() if FILE.fullmatch(path.name))
        sizes = [path.stat().st_size for path in paths]
        while paths and sum(sizes) > self._limit - self._size:
            paths.pop(0).unlink(missing_ok=True)
            sizes.pop(0)
        path = self._folder / f"{self._run}-{self._number:06d}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._number, self._written = self._number + 1, 0
        self._put(self._encode(self._head()) + b"\n")


class RecordingClient:
    """`EngineClient` that records another. `prompts`: tokens too, of prompts and of answers.

    `limit`: bytes of the folder's recordings at most. Salts are recorded as digests whose key is kept nowhere: equal
    ones stay equal.
    """

    def __init__(self, client: EngineClient, config: EngineConfig, folder: Path, *, prompts: bool, limit: int) -> None:
        self._client, self._prompts, self._config = client, prompts, config
        self._began = time.monotonic()
        self._secret = secrets.token_bytes(32)
        self._made: dict[str, list[list[int] | None]] = {}
        self._counts: dict[str, list[int]] = {}
        self._changing: dict[str, tuple[str, float | None]] = {}
        self._adapters: dict[str, str] = {}
        self._lock = threading.Lock()
        make_folder(folder)
        self._segments = Segments(folder, limit, self._head)

    @property
    def info(self) -> EngineInfo:
        """Facts about the loaded model."""
        return self._client.info

    @property
    def ready(self) -> bool:
        """Whether the recorded one is."""
        return self._client.ready

    def submit(self, request: Request) -> None:
        """Record a request and hand it over."""
        kept = without_pixels(request) if self._prompts else without_content(request)
        salt = hashlib.blake2b(request.cache_salt.encode(), key=self._secret, digest_size=8).hexdigest()
        salt = salt if request.cache_salt else ""
        kept = replace(kept, arrival=round(request.arrival - self._began, 6), cache_salt=salt)
        with self._lock:
            self._made[request.id] = [[] for _ in range(request.params.n)]
            self._counts[request.id] = [0] * request.params.n
            self._segments.add(RequestLine(at=self._now(), prompt_tokens=len(request.prompt), request=kept))
        self._client.submit(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Record that the edge ended a request, or one of its sequences, and pass it on."""
        with self._lock:
            live = self._made.get(request_id, [])
            for i in range(len(live)) if index is None else [index]:
                if request_id in self._made and live[i] is not None:
                    self._end(request_id, i, "abort")
        self._client.abort(request_id, index)

    def pause(self, request_id: str) -> bool:
        """Pass it on; no token depends on it."""
        return self._client.pause(request_id)

    def resume(self, request_id: str) -> None:
        """Pass it on."""
        self._client.resume(request_id)

    def change_adapter(self, name: str, folder: str) -> None:
        """Pass it on; it is recorded once it is done."""
        with self._lock:
            self._changing[name] = (folder, self._now())
        self._client.change_adapter(name, folder)

    def reset_prefix_cache(self) -> None:
        """Pass it on; no token depends on it."""
        self._client.reset_prefix_cache()

    def restart(self) -> None:
        """Pass it on; no token depends on it."""
        self._client.restart()

    def poll(self, timeout: float) -> StepReport | None:
        """The next step's report, written down."""
        report = self._client.poll(timeout)
        if report is not None:
            with self._lock:
                for change in report.changes:
                    folder, asked = self._changing.pop(change.name, ("", None))
                    if asked is not None and not change.error:
                        self._adapters[change.name] = folder
                        self._segments.add(AdapterLine(at=asked, name=change.name, folder=folder))
                for output in report.outputs:
                    self._take(output)
        return report

    def close(self) -> None:
        """Stop the engine, then write what is left."""
        self._client.close()
        self._segments.close()

    def _now(self) -> float:
        return round(time.monotonic() - self._began, 6)

    def _head(self) -> RunLine:
        return RunLine(
            format=FORMAT,
            version=quire.__version__,
            prompts=self._prompts,
            config=self._config,
            info=self._client.info,
            adapters=dict(self._adapters),
        )

    def _take(self, output: Output) -> None:
        made = self._made.get(output.request_id)
        if made is None or (tokens := made[output.index]) is None:
            return
        self._counts[output.request_id][output.index] += len(output.tokens)
        if self._prompts:
            tokens += output.tokens
        if output.finish_reason is not None:
            self._end(output.request_id, output.index, output.finish_reason)

    def _end(self, request_id: str, index: int, reason: FinishReason) -> None:
        made, count = self._made[request_id], self._counts[request_id][index]
        tokens = made[index]
        line = EndLine(at=self._now(), id=request_id, index=index, reason=reason, count=count)
        if self._prompts and tokens is not None:
            line = replace(line, tokens=tuple(tokens))
        self._segments.add(line)
        made[index] = None
        if all(each is None for each in made):
            del self._made[request_id], self._counts[request_id]
