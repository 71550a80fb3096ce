"""Images by URL: from named hosts alone, at addresses that were looked at, within size, time and redirects."""

from __future__ import annotations

import ipaddress
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from image_hosts import (
    DATA,
    _Handler,
    host,
    rules,
)
from live_server import LiveServer
from quire.core.errors import BadRequest, ConfigError
from quire.server.text_generation import fetching
from quire.server.text_generation.fetching import Host, fetch, is_public, read_hosts
from seeing import asked, image_part, said, seeing


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with host() as port:
        yield port


def got(port: int, path: str, **limits: Any) -> bytes:
    return fetch(f"http://127.0.0.1:{port}{path}", "url", rules(f"127.0.0.1:{port}", **limits))


@pytest.mark.parametrize("path", ["/image", "/image?a=%20b#c", "/open", "/chunked", "/once", "/twice"])
def test_what_comes(port: int, path: str) -> None:
    assert got(port, path) == DATA


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/missing", "status 404"),
        ("/huge", "--max-image-bytes"),
        ("/endless", "--max-image-bytes"),
        ("/short", "before the image did"),
        ("/compressed", "compressed"),
        ("/circle", "more than 3 redirects"),
        ("/nowhere", "nowhere"),
        ("/elsewhere", "elsewhere.example' is not named"),
        ("/inward", "169.254.169.254' is not named"),
        ("/to-a-file", "http:// or https://"),
        ("/%00 /../", "no spaces"),
    ],
)
def test_what_does_not(port: int, path: str, why: str) -> None:
    with pytest.raises(BadRequest, match=r"^url: ") as caught:
        got(port, path)
    assert why in caught.value.message and caught.value.param == "url" and "secret" not in caught.value.message


@pytest.mark.parametrize("path", ["/trickle", "/trickled-head", "/silent"])
def test_time_is_bounded_as_a_whole(port: int, path: str) -> None:
    began = time.monotonic()
    with pytest.raises(BadRequest, match=r"did not come within 0.3 s"):
        got(port, path, seconds=0.3)
    assert time.monotonic() - began < 5.0


def test_nothing_is_sent_along(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    _Handler.asked.clear()
    got(port, "/once")
    [(_, headers), (_, second)] = _Handler.asked
    assert headers == second and set(headers) == {"host", "accept", "accept-encoding", "user-agent", "connection"}
    assert headers["host"] == f"127.0.0.1:{port}"


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost:{port}/image",
        "http://[::1]:{port}/image",
        "http://127.1:{port}/image",
        "http://2130706433:{port}/image",
        "http://0x7f000001:{port}/image",
        "http://127.0.0.1:1/image",
        "http://127.0.0.1:{port}@elsewhere.example/",
        "http://user@127.0.0.1:{port}/image",
        "http://127.0.0.1.example:{port}/image",
        "http:///image",
        "http://127.0.0.1:port/image",
        "https+x://127.0.0.1:{port}/image",
    ],
)
def test_a_host_is_what_was_named(port: int, url: str) -> None:
    before = len(_Handler.asked)
    with pytest.raises(BadRequest):
        fetch(url.format(port=port), "url", rules(f"127.0.0.1:{port}"))
    assert len(_Handler.asked) == before


def test_names_do_not_lead_to_addresses_within(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    named = rules("localhost", "images.example")
    with pytest.raises(BadRequest, match="no address of the public internet"):
        fetch(f"http://localhost:{port}/image", "url", named)
    reached: list[tuple[str, int]] = []

    def refuse(address: tuple[str, int], timeout: float) -> socket.socket:
        reached.append(address)
        raise ConnectionRefusedError

    def resolved(*addresses: str) -> None:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in addresses]
        monkeypatch.setattr(fetching.socket, "getaddrinfo", lambda *_, **__: found)

    monkeypatch.setattr(fetching.socket, "create_connection", refuse)
    resolved("10.0.0.7", "192.168.1.1", "fe80::1%eth0", "::ffff:127.0.0.1", "224.0.0.1", "0.0.0.0")
    with pytest.raises(BadRequest, match="no address of the public internet"):
        fetch("http://images.example/a", "url", named)
    assert not reached
    # The connection goes to the address that was looked at, not to the name once more.
    resolved("10.0.0.7", "93.184.215.14")
    with pytest.raises(BadRequest, match="did not answer"):
        fetch("http://Images.Example./a", "url", named)
    assert reached == [("93.184.215.14", 80)]


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl here, which makes certificates")
def test_certificates_are_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "both.pem"
    key = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1"
    words = f"{key} -subj /CN=a.example -addext subjectAltName=DNS:a.example"
    made = [*words.split(), "-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    subprocess.run(["openssl", *made], check=True, capture_output=True)
    file.write_text((tmp_path / "key.pem").read_text() + (tmp_path / "cert.pem").read_text())
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.215.14", 443))]
    monkeypatch.setattr(fetching.socket, "getaddrinfo", lambda *_, **__: found)
    with host(file) as port:

        def here(_: Any, left: float) -> socket.socket:
            made = socket.socket()
            made.settimeout(left)
            made.connect(("127.0.0.1", port))
            return made

        monkeypatch.setattr(fetching.socket, "create_connection", here)
        named = rules("a.example", "b.example", seconds=20.0)
        with pytest.raises(BadRequest, match="SSLCertVerificationError"):
            fetch("https://a.example/image", "url", named)
        trusted = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        monkeypatch.setattr(fetching, "_trust", lambda: trusted)
        assert fetch("https://a.example/image", "url", named) == DATA
        assert fetch("https://a.example/once", "url", named) == DATA
        with pytest.raises(BadRequest, match="SSLCertVerificationError"):
            fetch("https://b.example/image", "url", named)
        with pytest.raises(BadRequest, match="from https to http"):
            fetch("https://a.example/elsewhere", "url", named)
        for slow in ("/trickle", "/trickled-head"):
            with pytest.raises(BadRequest, match=r"did not come within 0.5 s"):
                fetch(f"https://a.example{slow}", "url", rules("a.example", seconds=0.5))


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
     "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:10.0.0.1", "2002:7f00:1::",
     "64:ff9b::7f00:1", "198.18.0.1", "240.0.0.1",
     "fec0::1", "192.0.0.8", "192.0.0.171", "192.88.99.1", "3fff::1", "3fff:fff::1", "5f00::1", "100::1",
     "100:0:0:1::1",
     "64:ff9b:1::808:808", "2001:2::1", "2001:20::1", "2001::1", "2001:db8::1", "2002:7f00:1::", "2002:c058:6301::",
     "::8.8.8.8", "::ffff:192.88.99.1", "64:ff9b::c000:8", "255.255.255.255", "224.0.0.1", "ff02::1", "4000::1"],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address",
    ["93.184.215.14", "8.8.8.8", "2606:4700::1111", "64:ff9b::808:808", "2002:808:808::", "::ffff:8.8.8.8",
     "2a00:1450:4001::1", "192.0.1.1", "3fff:1000::1", "223.255.255.1"],
)  # fmt: skip
def test_addresses_that_are(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


def test_hosts_of_the_option() -> None:
    assert read_hosts(("a.example, B.example:8080", "[::1]:9", "bücher.example.")) == (
        Host("a.example", None), Host("b.example", 8080), Host("::1", 9), Host("xn--bcher-kva.example", None),
    )  # fmt: skip
    for wrong in ("http://a.example", "a.example/b", "*.example", "a:port", "u@a", ":80", "a?b"):
        with pytest.raises(ConfigError, match="--allow-media-url"):
            read_hosts((wrong,))


def test_through_a_server(port: int) -> None:
    with seeing(allow_media_url=(f"other.example,127.0.0.1:{port}",), media_timeout=1.0) as server:

        def ask(*paths: str) -> Any:
            parts = [image_part(f"http://127.0.0.1:{port}{path}") for path in paths]
            return server.post("/v1/chat/completions", {"messages": asked(*parts), "max_tokens": 1})

        assert ask("/image", "/twice").status_code == 200
        assert len(server.stub.submitted[-1].images) == 2 and said(server).count("<image>") == 8
        for path, why in {"/missing": "404", "/trickle": "within 1 s", "/elsewhere": "not named"}.items():
            reply = ask("/image", path)
            assert reply.status_code == 400, reply.text
            assert reply.json()["error"]["param"] == "messages[0].content[1].image_url.url" and why in reply.text
        _others_are_answered_meanwhile(server, ask)
        source = {"type": "url", "url": f"http://127.0.0.1:{port}/image"}
        body = {"model": "stub", "max_tokens": 1, "messages": asked({"type": "image", "source": source})}
        assert server.post("/v1/messages", body).status_code == 200


def _others_are_answered_meanwhile(server: LiveServer, ask: Callable[..., Any]) -> None:
    slow = [threading.Thread(target=ask, args=("/silent",)) for _ in range(12)]
    for thread in slow:
        thread.start()
    server.chat("hi", max_tokens=1)
    assert any(thread.is_alive() for thread in slow)
    for thread in slow:
        thread.join(10.0)
