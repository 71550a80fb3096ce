"""Connections between hosts: messages in order over TCP, from somebody who knows the cluster's secret.

A link begins with a nonce from each side and a proof from each side, HMAC-SHA256 under the secret, whoever dialed
first. Each message then carries a keyed BLAKE2b digest of its number and bytes, under a key of this link and direction:
nothing can be forged, repeated, left out or moved. Messages are not encrypted. Silence ends a link: both sides say
something each second.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import queue
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from quire.core.errors import ConfigError

logger = logging.getLogger("quire.link")

MAGIC, NONCE, PROOF, DIGEST = b"quire 1\n", 32, 32, 16
HEAD = struct.Struct(f">I{DIGEST}s")
LARGEST = 256 << 20
"""Bytes of the longest message."""
BEAT, SILENCE = 1.0, 5.0
"""Seconds after which something is said, and after which a link that says nothing is lost."""
HANDSHAKE_SECONDS = 5.0
STRANGERS = 32
"""Connections that may be in their handshake at one time."""
SECRET_BYTES = 16

Address = tuple[str, int]


class LinkLost(ConnectionError):
    """The other side has left, says nothing, or says what it cannot have said."""


def read_secret(file: str) -> bytes:
    """The cluster's secret; `ConfigError` where it is too short, or others than its owner may read it."""
    path = Path(file)
    try:
        mode, secret = path.stat().st_mode, path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--cluster-secret-file {file}: {error.strerror}", param="cluster_secret_file") from None
    if mode & 0o077:
        why = f"others than its owner may use it; chmod 600 {file}"
        raise ConfigError(f"--cluster-secret-file {file}: {why}", param="cluster_secret_file")
    if len(secret) < SECRET_BYTES:
        why = f"has {len(secret)} bytes, which can be guessed; at least {SECRET_BYTES}"
        raise ConfigError(f"--cluster-secret-file {file}: {why}", param="cluster_secret_file")
    return secret


class Link:
    """One connection whose other side is known. Any thread may send, one receives."""

    def __init__(self, sock: socket.socket, key: bytes, dialed: bool) -> None:
        directions = (b"to server", b"to client") if dialed else (b"to client", b"to server")
        self._out, self._in = (hashlib.blake2b(key=key, person=way, digest_size=32).digest() for way in directions)
        self._sock, self._sent, self._received = sock, 0, 0
        self.peer: Address = sock.getpeername()[:2]
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._buffer, self._heard = bytearray(), time.monotonic()
        self._lost, self._receiving = "", threading.Lock()
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # a write to nobody ends as soon as silence does
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE * 1000))
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._sender = threading.Thread(target=self._send_all, name="quire-link", daemon=True)
        self._sender.start()

    def send(self, message: bytes) -> None:
        """Hand over a message that is not empty; never waits. `LinkLost` once it is known that nobody gets it."""
        if not 0 < len(message) <= LARGEST:
            raise ValueError(f"a message of {len(message)} bytes; 1 to {LARGEST} can be sent")
        if self._lost:
            raise LinkLost(self._lost)
        self._waiting.put(message)

    def receive(self, timeout: float) -> bytes | None:
        """The next message, or None after `timeout` seconds. `LinkLost` after the last one."""
        end = time.monotonic() + timeout
        while True:
            message = self._next()
            if message:
                return message
            if message is None and not self._read(max(0.0, end - time.monotonic())):
                return None

    def close(self) -> None:
        """Send what waits, within a moment, and leave; may be called twice."""
        self._waiting.put(None)
        self._sender.join(BEAT)
        self._lose("closed")
        with self._receiving:
            self._sock.close()

    def _next(self) -> bytes | None:
        """A message of the buffer, empty where it only says that somebody is there; None where none is whole."""
        if len(self._buffer) < HEAD.size:
            return None
        size, digest = HEAD.unpack_from(self._buffer)
        if size > LARGEST:
            raise self._lose("a message is longer than any can be")
        if len(self._buffer) < HEAD.size + size:
            return None
        message = bytes(memoryview(self._buffer)[HEAD.size : HEAD.size + size])
        del self._buffer[: HEAD.size + size]
        if not hmac.compare_digest(digest, _digest(self._in, self._received, message)):
            raise self._lose("a message is not from who it should be")
        self._received += 1
        return message

    def _read(self, seconds: float) -> bool:
        """Whether anything came in time."""
        with self._receiving:
            if not self._poll.poll(min(seconds, BEAT) * 1000):
                if time.monotonic() - self._heard > SILENCE:
                    raise self._lose(f"no word for {SILENCE:.0f} s")
                return seconds > BEAT
            try:
                data = self._sock.recv(1 << 18)
            except OSError as error:
                raise self._lose(error.strerror or str(error)) from None
        if not data:
            raise self._lose("the other side has left")
        self._heard = time.monotonic()
        self._buffer += data
        return True

    def _send_all(self) -> None:
        while True:
            try:
                message = self._waiting.get(timeout=BEAT)
            except queue.Empty:
                message = b""
            if message is None or self._lost:
                return
            try:
                self._sock.sendall(HEAD.pack(len(message), _digest(self._out, self._sent, message)) + message)
            except OSError as error:
                self._lose(error.strerror or str(error))
                return
            self._sent += 1

    def _lose(self, why: str) -> LinkLost:
        if not self._lost:
            self._lost = why
            with contextlib.suppress(OSError):  # it is closed already
                self._sock.shutdown(socket.SHUT_RDWR)
        return LinkLost(self._lost)


def _digest(key: bytes, number: int, message: bytes) -> bytes:
    return hashlib.blake2b(struct.pack(">Q", number) + message, key=key, digest_size=DIGEST).digest()


def _proof(key: bytes, who: bytes) -> bytes:
    return hmac.digest(key, who, "sha256")


def dial(address: Address, secret: bytes, source: str | None = None, seconds: float = HANDSHAKE_SECONDS) -> Link:
    """A link to who listens at `address`, from the address `source`. `OSError` where nobody is, `LinkLost` where
    somebody is who does not know the secret."""
    sock = socket.create_connection(address, seconds, (source, 0) if source else None)
    try:
        mine = secrets.token_bytes(NONCE)
        sock.sendall(MAGIC + mine)
        key = _key(secret, mine, _hello(sock))
        sock.sendall(_proof(key, b"client"))
        if not hmac.compare_digest(_exactly(sock, PROOF), _proof(key, b"server")):
            raise LinkLost(f"{address[0]}:{address[1]} does not know the cluster's secret")
        return Link(sock, key, dialed=True)
    except BaseException:
        sock.close()
        raise


def accept(sock: socket.socket, secret: bytes) -> Link:
    """The link of somebody who has dialed. `LinkLost` where he does not know the secret, `OSError` where he left."""
    sock.settimeout(HANDSHAKE_SECONDS)
    mine, theirs = secrets.token_bytes(NONCE), _hello(sock)
    sock.sendall(MAGIC + mine)
    key = _key(secret, theirs, mine)
    if not hmac.compare_digest(_exactly(sock, PROOF), _proof(key, b"client")):
        raise LinkLost("the other side does not know the cluster's secret")
    sock.sendall(_proof(key, b"server"))
    return Link(sock, key, dialed=False)


def _key(secret: bytes, client: bytes, server: bytes) -> bytes:
    return hmac.digest(secret, MAGIC + client + server, "sha256")


def _hello(sock: socket.socket) -> bytes:
    said = _exactly(sock, len(MAGIC) + NONCE)
    if not said.startswith(MAGIC):
        raise LinkLost("the other side is no quire of this version")
    return said[len(MAGIC) :]


def _exactly(sock: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        data = sock.recv(size - len(found))
        if not data:
            raise LinkLost("the other side left in the handshake; it may know another secret")
        found += data
    return found


class Listener:
    """Listens at one address, and gives each link to `serve`, in a thread of its own."""

    def __init__(self, address: Address, secret: bytes, serve: Callable[[Link], None]) -> None:
        """`ConfigError` where nothing can listen there."""
        self._secret, self._serve = secret, serve
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        try:
            self._sock = socket.create_server(address, family=family, backlog=128)
        except OSError as error:
            where = f"{address[0]}:{address[1]}"
            raise ConfigError(f"nothing can listen at {where}: {error.strerror}", param="master_port") from None
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
            threading.Thread(target=self._take, args=(sock, peer[0]), name="quire-linked", daemon=True).start()

    def _take(self, sock: socket.socket, peer: str) -> None:
        with sock:
            try:
                link = accept(sock, self._secret)
            except OSError as error:
                logger.warning("a connection from %s was refused: %s", peer, error)
                return
            finally:
                self._strangers.release()
            try:
                self._serve(link)
            except LinkLost as lost:
                logger.info("the link from %s is lost: %s", peer, lost)
            finally:
                link.close()
