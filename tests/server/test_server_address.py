"""Where a server listens, and which pages may call it."""

from __future__ import annotations

import os
import signal
import socket
import stat
from pathlib import Path

import httpx
import pytest

from live_server import live, wait_until
from quire.core.errors import ConfigError
from quire.server.http.address import bind
from quire.server.server_options import ServerOptions
from serving_process import Serving


def test_a_socket_in_the_file_system_serves_this_user_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    with Serving("--uds", str(path)) as server:
        wait_until(lambda: f"unix:{path}" in "".join(server.log), seconds=60)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=20.0) as client:
            reply = client.post("/v1/completions", json={"prompt": "import", "max_tokens": 3})
        assert reply.status_code == 200
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(10) == 0
    assert not path.exists()


def test_a_socket_that_was_left_behind_is_replaced_and_one_in_use_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    with bind(ServerOptions(uds=str(path))) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="another program listens there"):
            bind(ServerOptions(uds=str(path)))
    plain = tmp_path / "file"
    plain.write_text("mine")
    with pytest.raises(ConfigError, match=f"--uds {plain}"):
        bind(ServerOptions(uds=str(plain)))
    assert plain.read_text() == "mine"


def test_only_pages_of_origins_that_are_named_may_call() -> None:
    asks = {"origin": "https://a.example", "access-control-request-method": "POST"}
    with live(allowed_origins=("https://a.example",), api_key=("k",)) as server:
        allowed = server.http.options("/v1/completions", headers=asks)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        other = server.http.options("/v1/completions", headers=asks | {"origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        refused = server.post("/v1/completions", {"prompt": "a"}, headers={"origin": "https://a.example"})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://a.example"
    with live() as server:
        assert "access-control-allow-origin" not in server.http.options("/v1/completions", headers=asks).headers


def test_a_level_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="--log-level 'loud' is not one of debug, info, warning, error"):
        ServerOptions(log_level="loud").validate()
