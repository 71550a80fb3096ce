"""A measured engine as a process of its own: memory and crashes are its own, and it works only when it is asked to.

It speaks the protocol of `foreign/protocol.py`: one JSON object a line in, one out. Waiting, it does not spin.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.bench.suite.environments import with_variables
from quire.core.errors import EngineFailure

PAUSE = 0.3
"""Seconds before each command: OpenMP threads of the engine that answered last may still spin (Intel's for 0.2)."""
LOAD_SECONDS = 3600.0
END_SECONDS = 30.0
SHOWN = 600


class Died(EngineFailure):
    """A measured process ended, said nothing in time, or answered with an error."""


@dataclass(frozen=True)
class Command:
    """How a measured process is started."""

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)


class Process:
    """A measured engine, ready. What it writes to standard error goes to `log`, whose end is shown when it dies."""

    def __init__(self, name: str, command: Command, log: Path, limit: float = LOAD_SECONDS) -> None:
        self.name, self._log, self._read = name, log, b""
        started = time.perf_counter()
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                with_variables(command.words, command.variables),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                process_group=0,  # so that its ranks end with it, and Ctrl-C is for the one that measures alone
            )
        try:
            self.facts = self._answer(limit)
        except BaseException:
            self.kill()
            raise
        self.load_seconds = time.perf_counter() - started

    @property
    def pid(self) -> int:
        """Process id of the first of its processes."""
        return self._process.pid

    def ask(self, command: dict[str, Any], limit: float = LOAD_SECONDS) -> dict[str, Any]:
        """The answer to one command; `Died` if there is none in `limit` seconds, or it is an error."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it is dead: reading says how
        return self._answer(limit)

    def rate(self, command: dict[str, Any]) -> float:
        """Tokens/s for one command."""
        time.sleep(PAUSE)
        return float(self.ask(command)["rate"])

    def _answer(self, limit: float) -> dict[str, Any]:
        end = time.monotonic() + limit
        while True:
            line = self._line(end)
            if line.startswith(b"{"):
                answer: dict[str, Any] = json.loads(line)
                if "error" in answer:
                    raise Died(str(answer["error"]))
                return answer

    def _line(self, end: float) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._read:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                self.kill()
                raise Died(f"{self.name} did not answer in time and was ended")
            part = os.read(self._process.stdout.fileno(), 1 << 20)
            if not part:
                raise Died(self._end())
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _end(self) -> str:
        """What is known of a process that has closed its output."""
        self._process.wait(END_SECONDS)
        code = self._process.returncode
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        lines = self._log.read_text(errors="replace").strip()[-SHOWN:].splitlines()
        return f"{self.name} ended with {how}: {' | '.join(line.strip() for line in lines[-3:])}"

    def close(self) -> None:
        """End of input ends the process; one that does not end is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End it and all processes of its group at once."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
