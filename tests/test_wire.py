"""Messages between hosts: what is taken, and that anything else drops the peer with a reason of one line."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.core.errors import ConfigError, EngineFailure
from quire.parallel import wire
from quire.parallel.digest import ReceivedDigests, SentDigests, digest
from quire.parallel.host_messages import Hub, Spoke
from quire.parallel.wire import HEAD, HELLO, TAG, ConnectionDropped, Peer, call, greet, listen, read_secret

SECRET = b"s" * 32
KEY = b"k" * 32


@contextlib.contextmanager
def pair(longest: int = 1 << 16) -> Iterator[tuple[Peer, Peer, socket.socket]]:
    """Two sides that have greeted, and the raw socket of the first."""
    a, b = socket.socketpair()
    first, second = Peer(a, "first", (KEY, KEY[::-1]), longest), Peer(b, "second", (KEY[::-1], KEY), longest)
    first.send(b"")
    assert second.receive(5) == b""
    yield first, second, a
    first.close()
    second.close()


def recorded(first: Peer, raw: socket.socket, payload: bytes) -> bytes:
    """The bytes that `first` would send."""
    own, other = socket.socketpair()
    first._sock = own
    first.send(payload)
    first._sock = raw
    found = other.recv(1 << 20)
    own.close()
    other.close()
    return found


def dropped(peer: Peer) -> str:
    """Why a peer is dropped; it stays so."""
    with pytest.raises(ConnectionDropped) as error:
        while True:
            assert peer.receive(5) is not None
    with pytest.raises(ConnectionDropped):
        peer.send(b"x")
    assert "\n" not in error.value.message and peer.reason == error.value.message
    return error.value.message


def test_frames_of_any_length_arrive_in_order() -> None:
    said = [b"x", b"", bytes(range(256)) * 4000]
    listener = listen("127.0.0.1", 0)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call, *listener.getsockname(), SECRET, 10)
        peer, caller = greet(listener.accept()[0], SECRET, called=True), calling.result()
        for sender, taker in ((peer, caller), (caller, peer)):
            pool.submit(lambda sender=sender: [sender.send(each) for each in said])
            assert [taker.receive(10) for _ in said] == said
    assert peer.receive(0.01) is None
    caller.close()
    assert dropped(peer).endswith("ended the connection")
    listener.close()


def test_another_secret_is_dropped_by_both_sides() -> None:
    listener = listen("127.0.0.1", 0)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call, *listener.getsockname(), b"t" * 32, 10)
        with pytest.raises(ConnectionDropped, match=r"127\.0\.0\.1:\d+ has another secret"):
            greet(listener.accept()[0], SECRET, called=True)
        with pytest.raises(ConnectionDropped):
            calling.result()
    listener.close()


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"GET / HTTP/1.1\r\n" * 4, "does not speak this protocol"),
        (HELLO + b"n" * 32 + bytes(12 + TAG), "another secret"),
        (HELLO + b"n" * 32 + HEAD.pack(1, 0), "announced a frame of 1 bytes, longer than 0"),
        (b"", "ended the connection"),
        (HELLO, "amid a frame"),
    ],
)
def test_strangers_are_dropped(sent: bytes, why: str) -> None:
    a, b = socket.socketpair()
    a.sendall(sent)
    a.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionDropped, match=why):
        greet(b, SECRET, called=True)
    a.close()


def test_who_sends_back_what_it_hears_is_dropped() -> None:
    a, b = socket.socketpair()

    def mirror() -> None:
        with contextlib.suppress(OSError):
            while data := a.recv(1 << 16):
                a.sendall(data)

    threading.Thread(target=mirror, daemon=True).start()
    with pytest.raises(ConnectionDropped, match="another secret"):
        greet(b, SECRET, called=True)
    a.close()


def test_a_silent_caller_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "GREETING_S", 0.1)
    a, b = socket.socketpair()
    with pytest.raises(ConnectionDropped, match="did not greet in time"):
        greet(b, SECRET, called=True)
    a.close()


def test_replayed_skipped_and_changed_frames() -> None:
    with pair() as (first, second, raw):
        frame = recorded(first, raw, b"pay")
        raw.sendall(frame + frame)
        assert second.receive(5) == b"pay" and "sent frame 1 where 2 was due" in dropped(second)
    with pair() as (first, second, raw):
        recorded(first, raw, b"lost")
        first.send(b"next")
        assert "sent frame 2 where 1 was due" in dropped(second)
    for at in (0, 5, 11, 12, 14, 16, 46):
        with pair() as (first, second, raw):
            frame = bytearray(recorded(first, raw, b"pay"))
            frame[at] ^= 1
            raw.sendall(frame)
            raw.shutdown(socket.SHUT_WR)
            dropped(second)


def test_frames_of_another_connection_are_refused() -> None:
    frames = []
    for _ in range(2):
        a, b = socket.socketpair()
        with ThreadPoolExecutor(1) as pool:
            calling = pool.submit(greet, a, SECRET, False)
            second, first = greet(b, SECRET, called=True), calling.result()
        frames.append((recorded(first, a, b"pay"), second, a))
    frames[1][2].sendall(frames[0][0])
    assert "does not prove the secret" in dropped(frames[1][1])
    for _, second, sock in frames:
        second.close()
        sock.close()


def test_truncated_and_oversized_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    for keep in (1, 12, 14, 40):
        with pair() as (first, second, raw):
            raw.sendall(recorded(first, raw, b"pay")[:keep])
            raw.shutdown(socket.SHUT_WR)
            assert "ended the connection amid a frame" in dropped(second)
    with pair() as (first, second, raw):
        raw.sendall(HEAD.pack((1 << 16) + 1, 1))
        assert "announced a frame of 65,537 bytes, longer than 65,536" in dropped(second)
        with pytest.raises(ValueError, match="is longer than 65,536"):
            first.send(bytes((1 << 16) + 1))
    monkeypatch.setattr(wire, "FRAME_S", 0.1)
    with pair() as (_, second, raw):
        raw.sendall(HEAD.pack(5, 1))
        assert "left a frame unfinished" in dropped(second)
    with pair() as (first, second, _):
        with pytest.raises(ConnectionDropped, match="did not take a frame in time"):
            for _ in range(1000):
                first.send(bytes(1 << 16))
        assert second.receive(1) is not None


@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_garbage(count: int) -> None:
    rng = random.Random(count)
    for _ in range(count):
        with pair() as (first, second, raw):
            good = recorded(first, raw, rng.randbytes(rng.randrange(64)))
            kind = rng.randrange(4)
            if kind == 0:
                data = rng.randbytes(rng.randrange(1, 200))
            elif kind == 1:
                data = HEAD.pack(rng.randrange(64), rng.choice((0, 1, 2))) + rng.randbytes(rng.randrange(200))
            elif kind == 2:
                at = rng.randrange(len(good))
                data = good[:at] + bytes([good[at] ^ 1 << rng.randrange(8)]) + good[at + 1 :]
            else:
                data = good[: rng.randrange(len(good))] + rng.randbytes(rng.randrange(100))
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
            if data.startswith(good):  # by chance: that is no garbage yet
                assert second.receive(5) == good[HEAD.size : -TAG]
            with pytest.raises(ConnectionDropped) as error:
                assert second.receive(5) is None
            assert "\n" not in error.value.message


def test_secrets_are_read_from_files_that_are_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    for text, mode, why in (
        (b"a" * 64 + b"\n", 0o640, "others may read"),
        (b"a" * 31 + b"\n", 0o600, "needs 32 to"),
        (b"a" * 5000, 0o600, "needs 32 to"),
    ):
        file.write_bytes(text)
        file.chmod(mode)
        with pytest.raises(ConfigError, match=why) as error:
            read_secret(file)
        assert error.value.param == "cluster_secret_file"
    file.write_bytes(b"a" * 64 + b"\n")
    assert read_secret(file) == b"a" * 64
    for path, why in ((tmp_path / "none", "No such file"), (tmp_path, "is not a file")):
        with pytest.raises(ConfigError, match=why):
            read_secret(path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="is not a file"):
        read_secret(tmp_path / "pipe")


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_nobody_listens_on_all_interfaces(host: str) -> None:
    with pytest.raises(ConfigError, match="name the address of one"):
        listen(host, 0)


def joined(world: int) -> tuple[Hub, list[Spoke]]:
    listener = listen("127.0.0.1", 0)
    host, port = listener.getsockname()
    with ThreadPoolExecutor(world) as pool:
        made = [pool.submit(Spoke, host, port, SECRET, rank, world, 10) for rank in range(1, world)]
        stranger, silent = socket.create_connection((host, port)), socket.create_connection((host, port))
        stranger.sendall(b"x" * 100)
        hub = Hub(listener, SECRET, world, 20)
        found = [each.result() for each in made]
    for sock in (stranger, silent, listener):
        sock.close()
    return hub, found


def test_ranks_join_and_say_what_they_have_to() -> None:
    hub, (first, second) = joined(3)
    hub.tell(b"all")
    assert first.hear(5000) == second.hear(5000) == b"all" and first.hear(1) is None
    second.say(b"two")
    first.say(b"one")
    assert hub.listen(1, 5000) == b"one" and hub.listen(2, 5000) == b"two" and hub.listen(1) is None
    second.leave()
    with pytest.raises(ConnectionDropped, match="ended the connection"):
        hub.listen(2, 5000)
    hub.leave()
    with pytest.raises(ConnectionDropped, match="ended the connection"):
        first.hear(5000)
    first.leave()


def test_who_is_missing_is_said() -> None:
    listener = listen("127.0.0.1", 0)
    host, port = listener.getsockname()
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(Spoke, host, port, SECRET, rank, world, 10) for rank, world in ((1, 3), (1, 3), (2, 4))]
        with pytest.raises(ConfigError, match=r"ranks \[2\] have not joined"):
            Hub(listener, SECRET, 3, 1.5)
        for each in calls:
            each.result().leave()
    listener.close()
    with pytest.raises(ConnectionDropped, match=f"{host}:{port}"):
        Spoke(host, port, SECRET, 1, 2, 0.2)


def test_ranks_that_differ_are_named() -> None:
    hub, spokes = joined(3)
    said, heard = [SentDigests(spoke) for spoke in spokes], ReceivedDigests(hub, patience_ms=200)
    for step in range(1, 4):
        for rank in (heard, *said):
            rank.step((step, 2), b"arrays" * step)
        heard.settle()
    heard.step((1,), b"arrays")
    said[0].step((1,), b"arrays")
    said[1].step((1,), b"arraya")
    heard.settle(behind=1)
    with pytest.raises(EngineFailure, match=r"step 4: ranks \[2\] differ from rank 0"):
        heard.settle()
    heard.step((1,), b"")
    said[0].step((2,), b"")
    said[1].step((1,), b"")
    with pytest.raises(EngineFailure, match=r"step 5: ranks \[1\] differ"):
        heard.settle()
    heard.step((1,), b"")
    said[1].step((1,), b"")
    with pytest.raises(EngineFailure, match=r"step 6: ranks \[1\] have not come in time"):
        heard.settle()
    for each in (hub, *spokes):
        each.leave()


def test_a_digest_is_cheap() -> None:
    arrays = bytes(16 * (8 + 4 + 4 + 8) + 16 * 64 * 4)  # what 16 decodes of 1,024 tokens read
    begin = time.perf_counter()
    for step in range(2000):
        digest(step, (16, 16, 16, 64, 0), arrays)
    assert (time.perf_counter() - begin) / 2000 < 1e-3, "far above its microseconds, which a busy machine stretches"
