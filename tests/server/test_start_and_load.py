"""What a server says of itself: where it is, its load, fields that it ignores; and bodies as `curl -d` sends them."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from command_line import Run, run
from live_server import LiveServer, live
from quire.core.errors import ConfigError
from quire.engine.engine_options import engine_config
from quire.engine.shown_facts import slots_line
from quire.server import load_log
from quire.server.announce import announce, facts, places
from quire.server.http.address import check_free
from quire.server.load_log import Moment, line
from quire.server.server_options import ServerOptions
from tiny_model import write_tiny

__all__ = ["run"]
FORM = {"content-type": "application/x-www-form-urlencoded"}


def test_where_a_server_is(caplog: pytest.LogCaptureFixture) -> None:
    with live() as server:
        paths = server.server.paths
        assert {"/", "/dashboard", "/v1/models", "/openapi.json"} <= paths
        found = {name: place for name, place, _ in places(server.state, "http://0.0.0.0:80", paths)}
        assert found["page"] == "http://127.0.0.1:80/" and found["API"] == "http://127.0.0.1:80/v1"
        assert "docs" in found if "/docs" in paths else "docs" not in found
        assert places(server.state, "unix:/tmp/s", paths) == []
        told = dict(facts(server.state))
        assert list(told) == ["model", "memory", "slots"]
        assert "up to " in told["memory"] and "of KV cache in " in told["memory"] and "as it fills" in told["memory"]
        assert "at a time (--max-num-seqs)" in told["slots"] and "speculation" not in told["slots"]
        with caplog.at_level(logging.INFO, "quire.server"):
            announce(server.state, server.url, paths)
        assert f"dashboard: {server.url}/dashboard" in caplog.text
    with live(playground=False) as server:
        assert "page" not in {name for name, _, _ in places(server.state, server.url, server.server.paths)}


def test_speculation_is_told() -> None:
    config = engine_config({"speculative_config": '{"method": "ngram"}', "max_num_seqs": 1})
    assert slots_line(config) == "1 sequence at a time (--max-num-seqs), speculation by ngram, 8 tokens at most"


def test_the_line_on_the_load() -> None:
    before = Moment(0.0, blocks=100)
    assert line(before, Moment(10.0, blocks=100)) == "", "nothing is said where nothing was done"
    now = Moment(10.0, running=3, waiting=2, read=1000, written=500, used=25, blocks=100, queries=1000, hits=400)
    assert line(before, now) == (
        "3 requests running, 2 waiting; 100 tokens/s in, 50 tokens/s out; KV cache 25% used, "
        "40% of prompts from the prefix cache"
    )
    assert line(now, Moment(20.0, read=10, written=3, blocks=100)) == "", "a restarted engine counts from nothing"


def test_the_load_is_logged_while_there_is_work(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_log, "EVERY_SECONDS", 0.01)
    moments = iter([Moment(0.0), Moment(1.0, running=1, written=5), Moment(2.0, written=5)])

    class Of:
        @staticmethod
        def of(*_: Any) -> Moment:
            try:
                return next(moments)
            except StopIteration:
                raise asyncio.CancelledError from None

    monkeypatch.setattr(load_log, "Moment", Of)
    with (
        live(log_stats=False) as server,
        caplog.at_level(logging.INFO, "quire.load"),
        pytest.raises(asyncio.CancelledError),
    ):
        asyncio.run(load_log.log_load(server.state))
    assert [record.message.split(";")[0] for record in caplog.records if record.name == "quire.load"] == [
        "1 requests running, 0 waiting"
    ]


def test_ignored_fields_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with live() as server, caplog.at_level(logging.WARNING, "quire.requests"):
        for _ in range(2):
            server.complete(mirostat=2, **{"odd\nname": 1})
        server.chat(mirostat=2)
    told = [record.getMessage() for record in caplog.records if record.name == "quire.requests"]
    assert len(told) == 2 and "field mirostat is ignored" in told[0] and "odd\\nname" in told[1]


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/completion", "/api/generate", "/v1/responses"]
)
def test_json_as_curl_sends_it(path: str) -> None:
    said = {"/v1/chat/completions": b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}',
            "/v1/responses": b'{"input": "a", "max_output_tokens": 16}',
            "/api/generate": b'{"model": "stub", "prompt": "a"}'}  # fmt: skip
    body = said.get(path, b'{"prompt": "a", "max_tokens": 1, "n_predict": 1}')
    with live() as server:
        assert _post(server, path, body, FORM) == 200
        assert _post(server, path, body, FORM | {"origin": "http://evil.example"}) == 415
        assert _post(server, path, b"prompt=a&max_tokens=1", FORM) == 400


def _post(server: LiveServer, path: str, body: bytes, headers: dict[str, str]) -> int:
    return server.http.post(path, content=body, headers=headers).status_code


def test_a_port_in_use_is_known_before_anything_is_read(run: Run, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ways = [["serve", "/no/such/model"], ["serve", "--model", "a=/no/such/model"], ["serve", str(folder)],
                ["serve", "--plan", "/no/such/plan"]]  # fmt: skip
        for words in ways:
            code, _, err = run(*words, "--port", str(port))
            assert code == 2 and f"127.0.0.1:{port} is in use by another program" in err, words
    path = tmp_path / "socket"
    check_free(ServerOptions(uds=str(path)))
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        with pytest.raises(ConfigError, match="another program listens there"):
            check_free(ServerOptions(uds=str(path)))
