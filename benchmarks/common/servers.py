"""Servers started for a benchmark: up before the first request, stopped at the end, their processor time read."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 300


@dataclass(frozen=True)
class Server:
    """Where it answers, and its first process."""

    url: str
    pid: int
    ready_seconds: float = 0.0

    def memory(self) -> dict[str, int]:
        """Bytes of each process by its command: what is its own, and its part of what several map. Linux only."""
        held = {}
        for pid in self._times():
            try:
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
                name = Path(f"/proc/{pid}/comm").read_text().strip()
            except OSError:
                continue  # ended while we looked
            held[f"{name} {pid}"] = int(rollup.partition("\nPss:")[2].split()[0]) << 10
        return held

    def cpu_seconds(self) -> float:
        """Processor time of its processes so far, user and system, all threads. Linux only."""
        return sum(self._times().values())

    def _times(self) -> dict[int, float]:
        """Processor time of each of its processes."""
        parents, used = {}, {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue  # ended while we looked
                parents[int(entry.name)] = int(fields[1])
                used[int(entry.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        family = {self.pid}
        while more := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= more
        return {pid: used[pid] for pid in family if pid in used}


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def server(words: list[str], variables: dict[str, str], log: Path) -> Iterator[Server]:
    """A server that is up; it is stopped at the end. `SystemExit` shows the log of one that died."""
    port, began = free_port(), time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            [*words, "--host", "127.0.0.1", "--port", str(port)], env=os.environ | variables, stdout=out, stderr=out
        )
    url = f"http://127.0.0.1:{port}"
    try:
        while time.monotonic() - began < START_SECONDS:
            if process.poll() is not None:
                raise SystemExit(f"{words[0]} ended with exit code {process.returncode}:\n{log.read_text()[-2000:]}")
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
            except OSError:
                time.sleep(0.02)
        else:
            raise SystemExit(f"{words[0]} did not answer within {START_SECONDS} s:\n{log.read_text()[-2000:]}")
        yield Server(url, process.pid, time.monotonic() - began)
    finally:
        process.terminate()
        process.wait(60)
