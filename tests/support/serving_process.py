"""`quire serve` as a process: started, asked, and ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from live_server import wait_until


@contextmanager
def serving(*words: str) -> Iterator[str]:
    """The base URL of `quire serve` with these words; stopping it must take no force and end with exit code 0."""
    process = subprocess.Popen(
        [sys.executable, "-m", "quire", "serve", *words, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        found = re.search(r"http://[\d.]+:\d+", line)
        if found:
            break
    else:
        pytest.fail("the server said no address:\n" + "".join(seen))
    url = found.group()
    for _ in range(100):
        try:
            urllib.request.urlopen(url + "/readyz", timeout=5).close()
            break
        except OSError:
            time.sleep(0.1)
    yield url
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    process.stdout.close()


class Serving:
    """`quire serve` in a session of its own, as a shell starts it; its log is kept."""

    def __init__(
        self,
        *words: str,
        program: Sequence[str] = ("-m", "quire"),
        environment: dict[str, str] | None = None,
        module: str = "quire.engine.processes.worker",
        port: int = 0,
        within: Sequence[str] = (),
    ) -> None:
        """`program` is what Python runs, `module` what its engines run; port 0 is a free one; `within` runs it."""
        self._module = module.encode()
        command = [*within, sys.executable, *program, "serve", *words, "--port", str(port)]
        # Whoever runs the tests in the background has SIGINT ignored, and children inherit that.
        default = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
        env = os.environ | (environment or {})
        self.process = subprocess.Popen(  # type: ignore[call-overload]
            command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=env, **default
        )
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr:
            self.log.append(line)

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stderr.close()

    @contextlib.contextmanager
    def up(self) -> Iterator[httpx.Client]:
        """A client, once the server listens."""
        wait_until(lambda: "serving" in "".join(self.log), seconds=60)
        found = re.search(r"http://[\d.]+:\d+", "".join(self.log))
        assert found
        with httpx.Client(base_url=found[0], timeout=20.0) as client:
            yield client

    @property
    def engine(self) -> int:
        """The engine's process id; chat templates are rendered in another child."""
        (child,) = self.engines()
        return child

    def engines(self) -> list[int]:
        """The engine's process id, once it is one: a child that was only forked yet has its parent's name."""
        found = children(self.process.pid)
        return [c for c in found if self._module in Path(f"/proc/{c}/cmdline").read_bytes()]


def children(pid: int) -> list[int]:
    """Also those that other threads than the first started, as those of an engine that came after another."""
    return [int(child) for at in Path(f"/proc/{pid}/task").glob("*/children") for child in at.read_text().split()]


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists() or "Z (zombie)" in Path(f"/proc/{pid}/status").read_text()


def listening(pid: int) -> set[str]:
    """Addresses, in hexadecimal, at which a process takes connections in its own namespace."""
    inodes = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if f"socket:[{words[9]}]" in inodes and (words[3] == "0A" or table.startswith("udp")):
                found.add(words[1])
    return found
