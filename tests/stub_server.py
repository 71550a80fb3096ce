"""A server over a supervised stub engine, in a process of its own: `python stub_server.py FACTS`; what tests ask of it.

FACTS is JSON: "options" (the server's), "info" (the engine's), "step_seconds".
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from live_server import FOLDER, wait_until

HERE = Path(__file__).parent


class StubServer:
    """One that runs, until the end of a `with`. `options` are the server's, `info` changes facts of the engine;
    `first`: a folder whose modules are found before all others."""

    def __init__(
        self, step_seconds: float = 0.01, info: dict[str, Any] | None = None, first: Path | None = None, **options: Any
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        facts = {"step_seconds": step_seconds, "info": info or {}, "options": options | {"port": self.port}}
        path = os.pathsep.join([*([str(first)] if first else []), str(HERE.parent / "src"), str(HERE)])
        command = [sys.executable, str(HERE / "stub_server.py"), json.dumps(facts)]
        self.process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.PIPE)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=10.0)

    def __enter__(self) -> StubServer:
        wait_until(self._up, seconds=30)
        return self

    def _up(self) -> bool:
        assert self.process.poll() is None
        try:
            return self.client.get("/livez").status_code == 200
        except httpx.TransportError:
            return False

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    @property
    def rss(self) -> int:
        """Bytes of memory."""
        return rss_of(self.process.pid)

    @property
    def files(self) -> int:
        """Open files, connections among them."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    @property
    def in_flight(self) -> float:
        """Sequences that are not finished."""
        found = re.search(r"^quire:requests_in_flight\{.*\} (\S+)$", self.client.get("/metrics").text, re.MULTILINE)
        assert found
        return float(found[1])


def rss_of(pid: int) -> int:
    """Bytes of memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Forgetting(list[Any]):
    """What the stub notes for tests in its process: here nobody reads it, and it would count as the server's memory."""

    def append(self, _: Any) -> None:
        """Nothing."""


def main(given: str) -> int:
    """Serve until a signal."""
    from quire.core.config import EngineConfig, SchedulerConfig
    from quire.engine.processes.supervisor import RestartPolicy, SupervisedEngine
    from quire.server.options import ServerOptions
    from quire.server.run import serve
    from stub_engine import StubEngine, stub_info

    facts = json.loads(given)
    stub = StubEngine(stub_info(**{"folder": str(FOLDER), **facts["info"]}), step_seconds=facts["step_seconds"])
    stub.submitted, stub.aborted = Forgetting(), Forgetting()
    client = SupervisedEngine(lambda *_: stub, RestartPolicy(hang=0), SchedulerConfig())
    return serve(EngineConfig(), ServerOptions(**facts["options"]), lambda _: client)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
