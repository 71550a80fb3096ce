"""Connections that last as long as what they are for: over `wire`, and with a sign of life each second.

Whoever sends never waits. A side that says nothing for some seconds counts as gone, as with a cut cable. Addresses of
this host, at which others reach it, are found here too.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable

import msgspec

from quire.core.errors import ConfigError
from quire.parallel.wire import ConnectionDropped, Peer, call, greet, listen

logger = logging.getLogger("quire.cluster")

BEAT, SILENCE = 1.0, 5.0
"""Seconds after which something is said, and after which a link that says nothing is lost."""
CALL_SECONDS = 2.0
LAST_SECONDS = 1.0
"""That what was sent may take to leave when a link is closed."""
LONGEST = 256 << 20
"""Bytes of the longest message."""
STRANGERS = 32
"""Connections that may be greeted at one time."""

Address = tuple[str, int]


class Link:
    """Messages in order, to and from who knows the secret. Any thread may send, one receives. `ConnectionDropped` ends
    it."""

    def __init__(self, peer: Peer, address: Address) -> None:
        self._peer, self.address = peer, address
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._heard = time.monotonic()
        self._sender = threading.Thread(target=self._send_all, name="quire-link", daemon=True)
        self._sender.start()

    def send(self, message: bytes) -> None:
        """Hand over a message that is not empty; never waits. `ConnectionDropped` once it is known that nobody gets
        it."""
        if not 0 < len(message) <= LONGEST:
            raise ValueError(f"a message of {len(message):,} bytes; 1 to {LONGEST:,} can be sent")
        if self._peer.reason:
            raise ConnectionDropped(self._peer.reason)
        self._waiting.put(message)

    def receive(self, seconds: float) -> bytes | None:
        """The next message, or None when there is none for so long."""
        end = time.monotonic() + seconds
        while True:
            left = max(0.0, end - time.monotonic())
            message = self._peer.receive(min(left, BEAT))
            if message is not None:
                self._heard = time.monotonic()
                if message:
                    return message
            elif time.monotonic() - self._heard > SILENCE:
                raise self._peer.drop(f"has said nothing for {SILENCE:.0f} s")
            elif left <= BEAT:
                return None

    def close(self) -> None:
        """Let what was sent leave, within a moment, and go; may be called twice."""
        self._waiting.put(None)
        self._sender.join(LAST_SECONDS)
        self._peer.close()

    def _send_all(self) -> None:
        with contextlib.suppress(ConnectionDropped):  # who receives is told
            while not self._peer.reason:
                try:
                    message = self._waiting.get(timeout=BEAT)
                except queue.Empty:
                    message = b""
                if message is None:
                    return
                self._peer.send(message)


def dial(address: Address, secret: bytes) -> Link:
    """A link to who listens at `address`. `ConnectionDropped` where nobody does who knows the secret."""
    return Link(call(*address, secret, CALL_SECONDS, LONGEST), address)


class Listener:
    """Listens at one address, and gives each link to `serve`, in a thread of its own."""

    def __init__(self, address: Address, secret: bytes, serve: Callable[[Link], None]) -> None:
        """`ConfigError` where nothing can listen there."""
        self._secret, self._serve = secret, serve
        self._sock = listen(*address)
        self._strangers = threading.BoundedSemaphore(STRANGERS)
        self.address: Address = self._sock.getsockname()[:2]
        threading.Thread(target=self._listen, name="quire-listener", daemon=True).start()

    def close(self) -> None:
        """Take no more."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._sock.close()

    def _listen(self) -> None:
        while True:
            self._strangers.acquire()
            try:
                sock, peer = self._sock.accept()
            except OSError:
                return
            threading.Thread(target=self._take, args=(sock, peer[:2]), name="quire-linked", daemon=True).start()

    def _take(self, sock: socket.socket, address: Address) -> None:
        try:
            peer = greet(sock, self._secret, called=True, longest=LONGEST)
        except ConnectionDropped as refused:
            logger.warning("refused: %s", refused)
            return
        finally:
            self._strangers.release()
        link = Link(peer, address)
        try:
            self._serve(link)
        except ConnectionDropped as dropped:
            logger.info("%s", dropped)
        except msgspec.MsgspecError as error:
            logger.warning("%s:%d says what is not understood: %s", *address, error)
        finally:
            link.close()


SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""


def address_of(interface: str) -> str:
    """The address that `--interface` means: its own text where it is one, else that of the interface of this name."""
    try:
        return str(ipaddress.ip_address(interface))
    except ValueError:
        pass
    try:
        import fcntl  # not on Windows

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            asked = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(sock.fileno(), SIOCGIFADDR, asked)[20:24])
    except (OSError, ImportError) as error:
        raise ConfigError(
            f"--interface {interface}: neither an address nor an interface with an IPv4 address: {error}",
            param="interface",
        ) from None


def address_towards(host: str, port: int) -> str:
    """The address of this host that others see who are reached by `host`; `OSError` where there is no way."""
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(where)  # sends nothing
        return str(sock.getsockname()[0])
