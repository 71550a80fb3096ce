"""Servers that a benchmark starts: up before the first request, ended when nobody needs them any more."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from quire.bench.suite.environments import with_variables
from quire.bench.suite.watch import cpu_seconds, family_of
from quire.core.errors import EngineFailure

HOST = "127.0.0.1"
START_SECONDS = 300.0
END_SECONDS = 60.0


@dataclass(frozen=True)
class StartedServer:
    """Where a server answers, its first process, and how long it took until it answered."""

    url: str
    pid: int
    ready_seconds: float

    def memory(self) -> dict[str, int]:
        """Bytes of each process by its command: what is its own, and its part of what several map. Linux only."""
        held = {}
        for pid in family_of(self.pid):
            try:
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
                name = Path(f"/proc/{pid}/comm").read_text().strip()
            except OSError:
                continue  # ended while we looked
            held[f"{name} {pid}"] = int(rollup.partition("\nPss:")[2].split()[0]) << 10
        return held

    def cpu_seconds(self) -> float:
        """Processor time of its processes so far, user and system, all threads. Linux only."""
        return cpu_seconds(self.pid)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as s:
        s.bind((HOST, 0))
        return int(s.getsockname()[1])


@contextmanager
def started(
    words: list[str], variables: Mapping[str, str] | None = None, log: IO[str] = sys.stderr
) -> Iterator[StartedServer]:
    """Start a server by `words` on a free port, wait for its GET /health, and end it afterwards.

    What it writes goes to `log`. `EngineFailure` where it ends, or does not answer in `START_SECONDS`.
    """
    port, began = free_port(), time.monotonic()
    given = with_variables([*words, "--host", HOST, "--port", str(port)], dict(variables or {}))
    process = subprocess.Popen(given, stdout=log, stderr=log)
    url = f"http://{HOST}:{port}"
    try:
        while not _healthy(url):
            if process.poll() is not None:
                raise EngineFailure(f"{words[0]} ended with exit code {process.returncode}; its log says why")
            if time.monotonic() - began > START_SECONDS:
                raise EngineFailure(f"{words[0]} did not answer within {START_SECONDS:.0f} s; its log says why")
            time.sleep(0.02)
        yield StartedServer(url, process.pid, time.monotonic() - began)
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


@contextmanager
def server(words: list[str], variables: Mapping[str, str], log: Path) -> Iterator[StartedServer]:
    """`started` with a file as its log, whose end is in the error of a server that does not come up."""
    with log.open("w") as out:
        try:
            with started(words, variables, out) as found:
                yield found
        except EngineFailure as error:
            raise EngineFailure(f"{error.message}:\n{log.read_text(errors='replace')[-2000:]}") from None
