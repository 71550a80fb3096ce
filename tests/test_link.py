"""Links between hosts: who may speak, what is heard in which order, and when a link is lost."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.core.errors import ConfigError
from quire.parallel import link as links
from quire.parallel.interface import address_of, address_towards
from quire.parallel.link import HEAD, MAGIC, NONCE, Link, LinkLost, Listener, dial, read_secret

SECRET = b"what only hosts of this cluster know"


@contextlib.contextmanager
def pair() -> Iterator[tuple[Link, Link, Listener]]:
    """Both ends of a link."""
    ends: queue.Queue[Link] = queue.Queue()
    done = threading.Event()

    def serve(link: Link) -> None:
        ends.put(link)
        done.wait(60)

    listener = Listener(("127.0.0.1", 0), SECRET, serve)
    dialed = dial(listener.address, SECRET)
    try:
        yield dialed, ends.get(timeout=5), listener
    finally:
        dialed.close()
        done.set()
        listener.close()


def test_messages_of_any_length_arrive_in_order_both_ways() -> None:
    said = [b"x", bytes(range(256)) * 9000, *(b"%d" % i for i in range(300))]
    with pair() as (one, two, _):
        for sender, receiver in ((one, two), (two, one)):
            for message in said:
                sender.send(message)
            assert [receiver.receive(5) for _ in said] == said and receiver.receive(0.01) is None
        with pytest.raises(ValueError, match="a message of 0 bytes"):
            one.send(b"")
        one.send(b"last")
        one.close()
        assert two.receive(5) == b"last"
        with pytest.raises(LinkLost, match="has left"):
            two.receive(5)
        with pytest.raises(LinkLost):
            two.send(b"to nobody")


def test_silence_ends_a_link_and_beats_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SILENCE", 0.6)
    monkeypatch.setattr(links, "BEAT", 0.2)
    with pair() as (one, two, _):
        assert one.receive(1.5) is None, "nothing is said, and the other side is there"
        two._waiting.put(None)  # it stops saying anything, as a host that hangs
        began = time.monotonic()
        with pytest.raises(LinkLost, match="no word"):
            one.receive(5)
        assert 0.3 < time.monotonic() - began < 3


def raw(listener: Listener) -> socket.socket:
    return socket.create_connection(listener.address, 5)


def test_who_does_not_know_the_secret_is_not_listened_to(caplog: pytest.LogCaptureFixture) -> None:
    served: list[Link] = []
    listener = Listener(("127.0.0.1", 0), SECRET, served.append)
    with pytest.raises(LinkLost, match="secret"):
        dial(listener.address, b"another secret of many bytes")
    for said in (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" + b"x" * 40, MAGIC + bytes(NONCE) + bytes(32)):
        with raw(listener) as sock:
            sock.sendall(said)
            heard = b""
            with contextlib.suppress(ConnectionResetError):
                while data := sock.recv(100):
                    heard += data
            assert len(heard) <= len(MAGIC) + NONCE, "no proof of anything"
    listener.close()
    assert not served and "was refused" in caplog.text


@pytest.mark.parametrize("harm", ["flipped", "repeated", "left out", "too long"])
def test_what_was_changed_on_the_way_ends_the_link(harm: str) -> None:
    """A man in the middle who passes on the handshake, and then harms the second message."""
    ends: queue.Queue[Link] = queue.Queue()
    done = threading.Event()
    listener = Listener(("127.0.0.1", 0), SECRET, lambda link: (ends.put(link), done.wait(60))[0])
    middle = socket.create_server(("127.0.0.1", 0))

    def meddle() -> None:
        with middle.accept()[0] as near, raw(listener) as far:
            threading.Thread(target=pump, args=(far, near), daemon=True).start()
            for size in (len(MAGIC) + NONCE, 32):
                far.sendall(exactly(near, size))
            frames = [frame(near) for _ in range(2)]
            second = bytearray(frames[1])
            second[-1] ^= harm == "flipped"
            if harm == "too long":
                second[:4] = b"\xff" * 4
            sent = {"repeated": [frames[0], frames[0]], "left out": frames[1:]}.get(harm, [frames[0], bytes(second)])
            far.sendall(b"".join(sent))
            done.wait(60)

    threading.Thread(target=meddle, daemon=True).start()
    one = dial(middle.getsockname(), SECRET)
    two = ends.get(timeout=5)
    one.send(b"first")
    one.send(b"second")
    with pytest.raises(LinkLost, match="longer than any" if harm == "too long" else "not from who"):
        if harm != "left out":
            assert two.receive(5) == b"first"
        two.receive(5)
    done.set()
    one.close()
    listener.close()
    middle.close()


def exactly(sock: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        found += sock.recv(size - len(found))
    return found


def frame(sock: socket.socket) -> bytes:
    head = exactly(sock, HEAD.size)
    return head + exactly(sock, HEAD.unpack(head)[0])


def pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(4096):
            sink.sendall(data)


def test_secrets_that_others_may_read_or_guess_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    file.chmod(0o600)
    assert read_secret(str(file)) == SECRET
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_secret(str(file))
    file.chmod(0o600)
    file.write_bytes(b"short")
    with pytest.raises(ConfigError, match="5 bytes, which can be guessed"):
        read_secret(str(file))
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(str(tmp_path / "none"))


def test_interfaces_by_name_and_address() -> None:
    assert address_of("lo") == address_of("127.0.0.1") == address_towards("127.0.0.1", 1) == "127.0.0.1"
    with pytest.raises(ConfigError, match="--interface nowhere0"):
        address_of("nowhere0")
    with pytest.raises(ConfigError, match="nothing can listen at"):
        Listener(("192.0.2.1", 0), SECRET, lambda link: None)
