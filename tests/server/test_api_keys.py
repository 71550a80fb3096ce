"""Keys from options and a file: who is who, how often, and what a reload changes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from live_server import LiveServer, live
from quire.core.errors import ConfigError, Overloaded
from quire.server.keys import Keys, Tenant, read_keys
from quire.server.server_options import ServerOptions

ENTRIES = {"ann": {"key": "a-key", "weight": 3}, "bob": {"key": "b-key", "requests_per_minute": 2}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(ENTRIES))
    return path


def sent(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode())]


def test_tenants_have_names_weights_and_salts_of_their_own(file: Path) -> None:
    keys = Keys(ServerOptions(api_keys_file=str(file), api_key=("plain",)))
    assert keys.tenant(sent("a-key")) == Tenant("ann", "tenant ann\0", 3.0)
    assert keys.tenant(sent("plain")) == Tenant("key 0", "key 0\0", admin=True)
    assert keys.tenant(sent("other")) is None and keys.tenant([]) is None
    assert Keys(ServerOptions(api_key=("plain",))).tenant(sent("plain")) == Tenant(admin=True)
    assert not Keys(ServerOptions()).needed


def test_a_rate_is_a_bucket_that_fills(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, now = Keys(ServerOptions(api_keys_file=str(file))), [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    bob, ann = keys.tenant(sent("b-key")), keys.tenant(sent("a-key"))
    assert bob is not None and ann is not None
    keys.spend(bob)
    keys.spend(bob)
    with pytest.raises(Overloaded, match="the key of bob allows 2 requests a minute") as refused:
        keys.spend(bob)
    assert refused.value.retry_after == 30
    for _ in range(50):
        keys.spend(ann)
    now[0] += 31.0
    keys.spend(bob)
    with pytest.raises(Overloaded):
        keys.spend(bob)


def test_a_reload_takes_effect_and_a_broken_file_does_not(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = Keys(ServerOptions(api_keys_file=str(file)))
    file.write_text("{")
    keys.reload()
    assert keys.tenant(sent("a-key")) is not None and "the keys of before stay" in caplog.text
    file.write_text(json.dumps({"carl": {"key": "c-key"}}))
    keys.reload()
    assert keys.tenant(sent("a-key")) is None and keys.tenant(sent("c-key")) is not None


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "it looks like"), ('{"a": {"kee": "x"}}', "unknown field `kee`"), ('{"a": {"key": ""}}', "'a' needs"),
     ('{"a": {"key": "x", "weight": 0}}', "'a' needs"), ('{"a": {"key": "x"}, "b": {"key": "x"}}', "'b' is there")],
)  # fmt: skip
def test_what_is_wrong_with_the_file_is_said(file: Path, text: str, why: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=why):
        Keys(ServerOptions(api_keys_file=str(file)))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(str(tmp_path / "none"))


def ask(server: LiveServer, key: str) -> int:
    body = {"prompt": "hello", "max_tokens": 2}
    return server.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"}).status_code


def test_requests_carry_their_tenant_and_sighup_reads_the_file_again(file: Path) -> None:
    with live(api_keys_file=str(file)) as server:
        assert [ask(server, key) for key in ("a-key", "b-key", "c-key")] == [200, 200, 401]
        assert [ask(server, "b-key") for _ in range(2)] == [200, 429]
        assert [(r.tenant, r.weight, r.cache_salt) for r in server.stub.submitted[:2]] == [
            ("ann", 3.0, "tenant ann\0"), ("bob", 1.0, "tenant bob\0"),
        ]  # fmt: skip
        file.write_text(json.dumps({"carl": {"key": "c-key"}}))
        server.server.handle_exit(signal.SIGHUP, None)
        assert not server.state.draining
        assert [ask(server, key) for key in ("a-key", "c-key")] == [401, 200]


def test_a_key_may_have_so_many_sequences_in_flight(file: Path) -> None:
    file.write_text(json.dumps({"ann": {"key": "a-key", "max_sequences": 2}, "bob": {"key": "b-key"}}))
    with live(api_keys_file=str(file)) as server:
        many = {"prompt": "hello", "max_tokens": 2, "n": 3}
        refused = server.post("/v1/completions", many, headers={"authorization": "Bearer a-key"})
        assert refused.status_code == 400 and "its key allows 2" in refused.json()["error"]["message"]
        asked = {"prompt": "hello", "max_tokens": 2, "n": 2}
        for key in ("a-key", "b-key"):
            assert server.post("/v1/completions", asked, headers={"authorization": f"Bearer {key}"}).status_code == 200
        with server.engine.reserve(2, "ann"):
            assert [ask(server, key) for key in ("a-key", "b-key")] == [429, 200]


def test_without_keys_the_body_says_who_asks() -> None:
    with live() as server:
        server.complete(user="dora", max_tokens=1)
        assert server.stub.submitted[-1].tenant == "dora" and server.stub.submitted[-1].cache_salt == ""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"ann": {"key": "a"},\n"bob": {"key": "b"},\n"ann": {"key": "c"}}', "'ann' is there twice \\(lines 1, 3\\)"),
        ('{"ann": {"key": "a", "key": "b"}}', "'key' is there twice"),
        ('{"ann": {"key": "a"}, "\\u0061nn": {"key": "b"}}', "'ann' is there twice"),
    ],
)
def test_a_name_that_is_there_twice_is_refused_with_its_lines(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_keys(str(path))
    with pytest.raises(ConfigError, match=told):
        Keys(ServerOptions(api_keys_file=str(path)))
