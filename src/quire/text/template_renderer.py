"""Templates are rendered in processes of their own, which the kernel bounds (`quire.text.template_worker` says how).

One process starts with the first template (some 60 ms) and stays warm; a second one starts when two threads render at
once. A server ends the one that checked its templates at the start: the next one starts with the first chat. A process
that exceeds a bound is ended and replaced; one that something else ended, too, and what it was at is done again. All
end with the one that started them.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.core.errors import Unavailable
from quire.text.bounded_process import (
    MAX_REPLY,
    WALL_SECONDS,
    BoundedProcess,
    CpuTimeExceeded,
    Program,
    ReplyTooLarge,
    encoded,
)
from quire.text.bounded_process import ProcessEnded as _Ended

PROCESSES = 2
"""Most that render at once: while one works off its budget of CPU time, another serves."""
COMPILE_SECONDS, RENDER_SECONDS = 1.0, 0.25
"""CPU time of one compilation, and of one rendering beside that for what it is given."""
SECONDS_PER_BYTE, MOST_SECONDS = 1e-6, 2.0
"""CPU time for each byte that a rendering is given, and the most there is in all. The dearest of published templates,
which asks a dozen questions of each message, takes 0.4 us a byte of messages of one letter, 0.04 of ordinary ones."""
REST = 3.0
"""Times as long as it took to exceed a bound that a template waits then: one that does so again and again, and each
time costs a process, takes a quarter of the time of the processes."""
START_AGAIN_SECONDS = 1.0
"""Until a process that did not start is tried again."""
MEMORY, SHARE = 64 << 20, 24
"""Bytes that a rendering may use beside those of the process at rest, and beside them for each byte it is given: values
and text at up to four bytes a character, in several copies."""
MAX_FRAME = 32 << 20
"""Longest message to a process, in bytes."""
MAX_TEMPLATES = 64
"""Templates a process keeps compiled before another takes its place."""
_NAME = "the process that renders chat templates"
_SCRIPT = Path(__file__).with_name("template_worker.py")


class RenderError(Exception):
    """`kind`: "limit" for a bound exceeded, "large" for more than a template is given, "undefined" for a field that is
    missing, "refused" for what the template raised, "security" for what is not allowed, "failed" for any other error in
    it."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _Process(BoundedProcess):
    """One process, and the keys of the templates that it has compiled."""

    def __init__(self) -> None:
        """Start the process and wait until it is ready; `Unavailable` when it does not start."""
        super().__init__(Program(_NAME, _SCRIPT, ("jinja2", "markupsafe"), (MEMORY, SHARE, MAX_FRAME)))
        self.known: set[str] = set()
        self.rendered = False
        """Whether it did more than check templates."""

    def ask(self, job: Mapping[str, Any], seconds: float) -> str:
        """The text for `job`, for which it has `seconds` of CPU time, and some for each byte of values.

        `RenderError` when it exceeds a bound, `_Ended` when the process is gone for another reason.
        """
        data = encoded(job)
        if len(data) > MAX_FRAME:
            raise RenderError("large", f"{len(data)} bytes are more than the {MAX_FRAME} that a template may be given")
        if "values" in job:
            seconds = min(seconds + SECONDS_PER_BYTE * len(data), MOST_SECONDS)
        try:
            reply = self.exchange(data, seconds)
        except TimeoutError:
            raise Unavailable(f"no chat template was rendered within {WALL_SECONDS:g} s; the machine is busy") from None
        except ReplyTooLarge:
            raise RenderError("limit", f"its text has more than {MAX_REPLY >> 20} MiB") from None
        except CpuTimeExceeded:
            raise RenderError("limit", f"it takes more than {seconds:.2g} s of CPU time") from None
        if "text" in reply:
            return str(reply["text"])
        if reply["kind"] == "memory":
            raise RenderError("limit", f"it takes more than {MEMORY >> 20} MiB of memory")
        raise RenderError(str(reply["kind"]), str(reply["error"]))


class Renderer:
    """The processes; any thread may call."""

    def __init__(self) -> None:
        self._all: set[_Process] = set()
        self._idle: list[_Process] = []
        self._room = threading.BoundedSemaphore(PROCESSES)
        self._lock = threading.Lock()
        self._rests: dict[str, float] = {}
        self._start_again = 0.0

    def compile(self, source: str) -> None:
        """Nothing when `source` is a template, else `RenderError`."""
        self._run(source, None)

    def render(self, source: str, values: Mapping[str, Any], max_chars: int) -> str:
        """The text of the template `source`; `values` are plain JSON.

        It has at most `max_chars` characters, and four more for each byte of the values.
        """
        return self._run(source, {"values": values, "max_chars": max_chars})

    def _run(self, source: str, job: dict[str, Any] | None) -> str:
        key = hashlib.blake2b(source.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        with self._room:
            time.sleep(max(0.0, self._rests.get(key, 0.0) - time.monotonic()))
            begun = time.monotonic()
            try:
                try:
                    return self._try(key, source, job, self._take())
                except _Ended:  # by what looks for memory, say, and takes all that are idle
                    return self._try(key, source, job, self._start())
            except _Ended as error:
                told = f"the process that renders it ends with code {error.code}, as by a lack of memory"
                raise self._rested(key, begun, RenderError("limit", told)) from None
            except RenderError as error:
                raise self._rested(key, begun, error) from None

    def _try(self, key: str, source: str, job: dict[str, Any] | None, process: _Process) -> str:
        text, keep = "", False
        try:
            if key not in process.known:
                process.ask({"key": key, "source": source}, COMPILE_SECONDS)
                process.known.add(key)
            if job is not None:
                process.rendered = True
                text = process.ask({"key": key, **job}, RENDER_SECONDS)
            keep = len(process.known) < MAX_TEMPLATES
            return text
        except RenderError as error:
            keep = error.kind != "limit"
            raise
        finally:
            self._give_back(process, keep)

    def _rested(self, key: str, begun: float, error: RenderError) -> RenderError:
        """`error` of what began at `begun`, after which the template waits if it exceeded a bound."""
        now = time.monotonic()
        self._rests = {k: until for k, until in self._rests.items() if until > now}
        if error.kind == "limit":
            self._rests[key] = now + REST * min(now - begun, MOST_SECONDS)
        return error

    def _take(self) -> _Process:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._start()

    def _start(self) -> _Process:
        if time.monotonic() < self._start_again:
            raise Unavailable(f"{_NAME} does not start; in a second it is tried again")
        try:
            process = _Process()
        except Unavailable:
            self._start_again = time.monotonic() + START_AGAIN_SECONDS
            raise
        with self._lock:
            self._all.add(process)
        return process

    def _give_back(self, process: _Process, keep: bool) -> None:
        with self._lock:
            if keep:
                self._idle.append(process)
            else:
                self._all.discard(process)
        if not keep:
            process.close()

    def rest(self) -> None:
        """End idle processes that have only checked templates; one starts when a text is to be rendered."""
        with self._lock:
            unused = [process for process in self._idle if not process.rendered]
            self._idle = [process for process in self._idle if process.rendered]
            self._all.difference_update(unused)
        for process in unused:
            process.close()

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            processes = list(self._all)
            self._all.clear()
            self._idle.clear()
        for process in processes:
            process.close()

    def after_fork(self) -> None:
        """Start anew in the child of a fork: start anew, and hold no end of what belongs to the parent."""
        for process in self._all:
            process.forget()
        self.__init__()  # type: ignore[misc]


RENDERER = Renderer()
"""That of this process."""
atexit.register(RENDERER.close)
os.register_at_fork(after_in_child=RENDERER.after_fork)
