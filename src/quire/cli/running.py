"""`quire ps` and `quire stop`: the servers of this user that run on this machine."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import ssl
import time
from typing import Any
from urllib.parse import urlsplit

from quire.cli.complete import complete_server
from quire.cli.params import argument, command, option
from quire.core.errors import ConfigError, EngineFailure
from quire.core.running import RunningServer, ended, memory_of, servers, uptime

ASK_SECONDS = 2.0
STOP_SECONDS = 15.0
"""Time to end beyond what the server lets requests take."""
RUNNING = re.compile(r"^(vllm:num_requests_(?:running|waiting))\{.*\} (\S+)$", re.MULTILINE)


@command("ps", option("--json", "as_json", is_flag=True, help="Print a JSON list, for scripts."))
def ps(as_json: bool) -> None:
    """List running servers: model, memory, requests, address and uptime."""
    rows = [_row(server) for server in servers()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    if not rows:
        print("no server of quire runs here; quire serve starts one")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("MODEL", "PID", "MEMORY", "REQUESTS", "ADDRESS", "UP"):
        table.add_column(name, justify="right" if name in ("PID", "MEMORY", "REQUESTS") else "left", no_wrap=True)
    for row in rows:
        requests = "-" if row["running"] is None else f"{row['running']}+{row['waiting']}"
        memory = f"{row['memory_bytes'] / 1e6:,.0f} MB"
        words = (
            ", ".join(row["models"]),
            str(row["pid"]),
            memory,
            requests,
            row["address"],
            _span(row["uptime_seconds"]),
        )
        table.add_row(*map(Text, words))
    console = Console()
    console.print(table, soft_wrap=not console.is_terminal)
    print("REQUESTS: running + waiting; - = the server does not say")


@command(
    "stop",
    argument(
        "which",
        metavar="MODEL|ADDRESS|PID",
        required=False,
        shell_complete=complete_server,
        help="The server; not needed where there is one.",
    ),
    option("--all", "everything", is_flag=True, help="Stop all of them."),
)
def stop(which: str | None, everything: bool) -> None:
    """Stop running servers: requests in flight are finished first. Without a name, the only one that runs."""
    chosen = _chosen(which, everything, servers())
    for server in chosen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGTERM)
    for server in chosen:
        end = time.monotonic() + server.patience + STOP_SECONDS
        while not ended(server.pid):
            if time.monotonic() > end:
                raise EngineFailure(f"{_told(server)} has not ended within {server.patience + STOP_SECONDS:.0f} s")
            time.sleep(0.05)
        print(f"stopped {_told(server)}")


def _chosen(which: str | None, everything: bool, found: list[RunningServer]) -> list[RunningServer]:
    """The servers that are meant; `ConfigError` where it is open which."""
    if which is not None and everything:
        raise ConfigError(f"{which} and --all: give one of them")
    if not found:
        raise ConfigError("no server of quire runs here" + (f", so none is {which}" if which else ""))
    running = "\n".join(f"  {_told(server)}" for server in found)
    if everything or (which is None and len(found) == 1):
        return found
    if which is None:
        raise ConfigError(f"several servers run; name one, or --all:\n{running}")
    matching = [server for server in found if which in _names(server)]
    if not matching:
        raise ConfigError(f"{which}: no server that runs is called so; these run:\n{running}")
    if len(matching) > 1:
        raise ConfigError(f"{which}: several servers have that; stop one by its address or pid:\n{running}")
    if which in matching[0].models and len(matching[0].models) > 1:
        raise ConfigError(
            f"{which}: {matching[0].address} serves {len(matching[0].models)} models; stop it by its address, or "
            "unload this one: POST /v1/models/unload"
        )
    return matching


def _names(server: RunningServer) -> set[str]:
    """All that a user may call it."""
    place = server.address.partition("://")[2]
    found = {server.address, place, str(server.pid), place.rpartition(":")[2], *server.models}
    return found | {name.rpartition("/")[2] for name in server.models}


def _told(server: RunningServer) -> str:
    return f"{', '.join(server.models)} on {server.address} (pid {server.pid})"


def _row(server: RunningServer) -> dict[str, Any]:
    running, waiting = _requests(server)
    return {
        "models": list(server.models),
        "pid": server.pid,
        "address": server.address,
        "memory_bytes": memory_of(server.pid),
        "running": running,
        "waiting": waiting,
        "uptime_seconds": round(uptime(server), 1),
        "version": server.version,
    }


def _requests(server: RunningServer) -> tuple[int | None, int | None]:
    """Requests that run and that wait; None where the server is busy, or keeps its metrics to those with a key."""
    connection = _connection(server.address)
    try:
        connection.request("GET", "/metrics", headers={"Host": "localhost"})
        reply = connection.getresponse()
        text = reply.read().decode()
        if reply.status != 200:
            return None, None
    except (OSError, http.client.HTTPException, ValueError):
        return None, None
    finally:
        connection.close()
    counts = {"running": 0, "waiting": 0}
    for name, value in RUNNING.findall(text):
        counts[name.rpartition("_")[2]] += int(float(value))
    return counts["running"], counts["waiting"]


def _connection(address: str) -> http.client.HTTPConnection:
    if address.startswith("unix:"):
        return _FileConnection(address.removeprefix("unix:"))
    parts = urlsplit(address)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(parts.hostname or "", parts.hostname or "")
    if parts.scheme == "https":  # our own process, which is sent no secret
        return http.client.HTTPSConnection(
            host, parts.port, timeout=ASK_SECONDS, context=ssl._create_unverified_context()
        )
    return http.client.HTTPConnection(host, parts.port, timeout=ASK_SECONDS)


class _FileConnection(http.client.HTTPConnection):
    """A connection to a server that listens on a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ASK_SECONDS)
        self._path = path

    def connect(self) -> None:
        """Open it."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(ASK_SECONDS)
        self.sock.connect(self._path)


def _span(seconds: float) -> str:
    """A time as people say it: 42 s, 3 min, 2 h 5 min, 3 d 4 h."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
