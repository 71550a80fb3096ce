"""Answers are checked by their JSON schemas in processes that the kernel bounds (`check` says how)."""

from __future__ import annotations

import atexit
import hashlib
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec

from quire.core.errors import Unavailable
from quire.text.bounded_process import BoundedProcess, CpuTimeExceeded, ProcessEnded, Program, ReplyTooLarge, encoded

SECONDS = 0.5
"""CPU time for one answer."""
MEMORY = 256 << 20
MAX_BYTES = 8 << 20
"""Longest answer that is checked."""
PROCESSES = 2
"""Most that check at once: while one works off its CPU time, another serves."""
PATIENCE = 10.0
"""Seconds that an answer waits for one of them."""
REMEMBERED = 256
"""Schemas that exceeded a bound, which are not tried again."""
_PROGRAM = Program(
    "the process that checks answers",
    Path(__file__).with_name("schema_check_worker.py"),
    ("jsonschema", "quire"),
    (MEMORY,),
)


class SchemaError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What of an answer its schema does not allow. `path`: a JSON pointer, "" = all of it. `tool`: of whose call."""

    message: str
    path: str = ""
    tool: str = ""
    choice: int = 0


class SchemaChecker:
    """The processes; any thread may call, and `PROCESSES` are served at a time."""

    def __init__(self) -> None:
        self._idle: list[BoundedProcess] = []
        self._hostile: OrderedDict[bytes, str] = OrderedDict()
        self._room = threading.BoundedSemaphore(PROCESSES)
        self._lock = threading.Lock()

    def errors(self, schema: str, text: str, tool: str = "", choice: int = 0) -> list[SchemaError]:
        """What of `text`, which is JSON, `schema` does not allow; that it could not be checked is an error too."""
        found = self._checked(schema, text)
        return [SchemaError(**each, tool=tool, choice=choice) for each in found]

    def _checked(self, schema: str, text: str) -> list[dict[str, str]]:
        data = encoded({"schema": schema, "text": text})
        if len(data) > MAX_BYTES:
            return _unchecked(f"it has more than {MAX_BYTES >> 20} MiB")
        key = hashlib.blake2b(schema.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if (reason := self._hostile.get(key)) is not None:
            return _unchecked(f"{reason} before")
        if not self._room.acquire(timeout=PATIENCE):
            return _unchecked("the machine is busy")
        try:
            process = self._take()
            reply: dict[str, Any] = dict(process.exchange(data, SECONDS))
        except CpuTimeExceeded:
            return self._noted(key, f"it took more than {SECONDS:g} s of CPU time")
        except (ProcessEnded, ReplyTooLarge):
            return self._noted(key, "it took too much memory or too deep a stack")
        except TimeoutError:
            process.close()
            return _unchecked("the machine is busy")
        except Unavailable as error:
            return _unchecked(error.message)
        finally:
            self._room.release()
        with self._lock:
            self._idle.append(process)
        if "error" in reply:
            return _unchecked(str(reply["error"]))
        errors: list[dict[str, str]] = reply["errors"]
        return errors

    def _noted(self, key: bytes, reason: str) -> list[dict[str, str]]:
        """A schema that exceeded a bound costs nothing the next time."""
        with self._lock:
            self._hostile[key] = reason
            if len(self._hostile) > REMEMBERED:
                self._hostile.popitem(last=False)
        return _unchecked(reason)

    def _take(self) -> BoundedProcess:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return BoundedProcess(_PROGRAM)

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            processes, self._idle = self._idle, []
        for process in processes:
            process.close()

    def after_fork(self) -> None:
        """Start anew in the child of a fork: start anew, and hold no end of what belongs to the parent."""
        for process in self._idle:
            process.forget()
        self.__init__()  # type: ignore[misc]


def _unchecked(reason: str) -> list[dict[str, str]]:
    return [{"message": f"not checked: {reason}"}]


CHECKER = SchemaChecker()
"""That of this process."""
atexit.register(CHECKER.close)
os.register_at_fork(after_in_child=CHECKER.after_fork)
