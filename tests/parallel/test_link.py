"""Links between hosts: what is heard in which order, who is not listened to, and when a link is lost."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator

import pytest

from quire.core.errors import ConfigError
from quire.parallel import link as links
from quire.parallel.link import Link, Listener, address_of, address_towards, dial
from quire.parallel.wire import ConnectionDropped

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
        with pytest.raises(ConnectionDropped, match="ended the connection"):
            two.receive(5)
        with pytest.raises(ConnectionDropped):
            two.send(b"to nobody")


def test_silence_ends_a_link_and_beats_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SILENCE", 0.6)
    monkeypatch.setattr(links, "BEAT", 0.2)
    with pair() as (one, two, _):
        assert one.receive(1.5) is None, "nothing is said, and the other side is there"
        two._waiting.put(None)  # it stops saying anything, as a host that hangs
        began = time.monotonic()
        with pytest.raises(ConnectionDropped, match="has said nothing"):
            one.receive(5)
        assert 0.3 < time.monotonic() - began < 3


def test_who_does_not_know_the_secret_is_not_served(caplog: pytest.LogCaptureFixture) -> None:
    served: list[Link] = []
    listener = Listener(("127.0.0.1", 0), SECRET, served.append)
    with pytest.raises(ConnectionDropped, match="secret"):
        dial(listener.address, b"another secret that has many bytes, too")
    listener.close()
    with pytest.raises(ConnectionDropped, match=f":{listener.address[1]} "):
        dial(listener.address, SECRET)
    assert not served and "refused: 127.0.0.1" in caplog.text


def test_interfaces_by_name_and_address() -> None:
    assert address_of("lo") == address_of("127.0.0.1") == address_towards("127.0.0.1", 1) == "127.0.0.1"
    with pytest.raises(ConfigError, match="--interface nowhere0"):
        address_of("nowhere0")
    with pytest.raises(ConfigError, match="cannot listen at"):
        Listener(("192.0.2.1", 0), SECRET, lambda link: None)
