"""Messages between hosts: frames over TCP that carry a number and a proof that the sender knows the cluster's secret.

Each side sends 32 random bytes. The keys of both directions come from these and the secret (HMAC-SHA256, RFC 2104), so
that nothing recorded elsewhere or sent back is taken. A frame is its length, its number, its bytes and their HMAC; one
that is wrong ends the connection, with a reason of one line. Nothing is encrypted: who reads the network reads tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import secrets
import select
import socket
import stat
import struct
import threading
import time
from pathlib import Path

from quire.core.errors import ConfigError, EngineFailure

HELLO = b"quire 1\n"
NONCE = 32
HEAD = struct.Struct(">IQ")
"""Of a frame: bytes that follow but for their HMAC, and which frame it is in this direction."""
TAG = 32
LONGEST = 64 << 20
"""Bytes of the longest frame."""
GREETING_S = 5.0
FRAME_S = 30.0
"""Seconds in which a frame that has begun is to be complete, in either direction."""
SHORTEST_SECRET, LONGEST_SECRET = 32, 4096


class ConnectionDropped(EngineFailure):
    """A connection was ended; the message says with whom and why, in one line."""


def read_secret(path: Path) -> bytes:
    """The secret of a cluster: 32 bytes or more in a file that nobody else may read. `ConfigError` if not."""

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"--cluster-secret-file {path}: {why}", param="cluster_secret_file")

    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise refuse(str(error.strerror)) from None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise refuse("is not a file")
        if status.st_mode & 0o077 or status.st_uid not in (0, os.geteuid()):
            raise refuse("others may read or write it; make it yours, and chmod 600")
        secret = os.read(file, LONGEST_SECRET + 1).rstrip(b"\r\n")
    finally:
        os.close(file)
    if not SHORTEST_SECRET <= len(secret) <= LONGEST_SECRET:
        raise refuse(f"needs {SHORTEST_SECRET} to {LONGEST_SECRET} bytes (openssl rand -hex 32), has {len(secret)}")
    return secret


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at the address `host` of one interface; port 0: any. `ConfigError` for all interfaces."""
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_unspecified:
            raise ConfigError(f"ranks do not listen on all interfaces: {host!r}; name the address of one")
        return socket.create_server(address, family=family, backlog=64)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror or error}") from None


class Peer:
    """One connection to a process that knows the secret. Threads may send at once; one at a time receives."""

    def __init__(self, sock: socket.socket, name: str, keys: tuple[bytes, bytes], longest: int = LONGEST) -> None:
        """`keys`: of what is sent, of what is received."""
        self.name, self._sock, self._longest = name, sock, longest
        self._send_key, self._receive_key = keys
        self._sent = self._received = 0
        self._sending = threading.Lock()
        self.reason = ""
        """Why the connection has ended, where it has."""

    def send(self, payload: bytes) -> None:
        """One frame. `ConnectionDropped` when it is not taken in 30 s, or was not before."""
        if len(payload) > self._longest:
            raise ValueError(f"a frame of {len(payload):,} bytes is longer than {self._longest:,}")
        with self._sending:
            self._check()
            head = HEAD.pack(len(payload), self._sent)
            self._sent += 1
            tag = _proof(self._send_key, head, payload)
            try:
                self._sock.settimeout(FRAME_S)
                self._sock.sendall(b"".join((head, payload, tag)))
            except OSError as error:
                raise self.drop(_why(error, "did not take a frame in time")) from None

    def receive(self, seconds: float | None = None) -> bytes | None:
        """The next frame, or None when none has begun for so long (None: for ever). `ConnectionDropped` for a wrong
        one."""
        self._check()
        try:
            if not _readable(self._sock, seconds):
                return None
            deadline = time.monotonic() + FRAME_S
            head = read_exactly(self._sock, HEAD.size, deadline)
            size, number = HEAD.unpack(head)
            # Until the secret is proved, only the empty frame that proves it.
            limit = self._longest if self._received else 0
            if size > limit:
                raise self.drop(f"announced a frame of {size:,} bytes, longer than {limit:,}")
            payload, tag = (read_exactly(self._sock, n, deadline, begun=True) for n in (size, TAG))
        except (OSError, ValueError) as error:
            raise self.drop(_why(error, "left a frame unfinished")) from None
        if not hmac.compare_digest(tag, _proof(self._receive_key, head, payload)):
            raise self.drop("sent a frame that does not prove the secret" if self._received else "has another secret")
        if number != self._received:
            raise self.drop(f"sent frame {number} where {self._received} was due")
        self._received += 1
        return payload

    def drop(self, why: str) -> ConnectionDropped:
        """End the connection; the error to raise."""
        self.reason = self.reason or f"{self.name} {why}"
        self.close()
        return ConnectionDropped(self.reason)

    def close(self) -> None:
        """End the connection; who receives on it stops."""
        self.reason = self.reason or f"the connection to {self.name} is closed"
        with contextlib.suppress(OSError):  # the other side was first
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _check(self) -> None:
        if self.reason:
            raise ConnectionDropped(self.reason)


def _readable(sock: socket.socket, seconds: float | None) -> bool:
    # Not select(), which knows only the first 1,024 descriptors.
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))


def read_exactly(sock: socket.socket, size: int, deadline: float, begun: bool = False) -> bytes:
    """`size` bytes; memory grows with what arrives, not with what was announced.

    `ConnectionError` when the other side ends before, `TimeoutError` at `deadline`.
    """
    found = bytearray()
    while len(found) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        piece = sock.recv(min(size - len(found), 1 << 20))
        if not piece:
            raise ConnectionError("ended the connection" + (" amid a frame" if found or begun else ""))
        found += piece
    return bytes(found)


def greet(sock: socket.socket, secret: bytes, called: bool, longest: int = LONGEST) -> Peer:
    """The process at the other end of a new connection, once both have proved the secret. `called`: by that one.

    `ConnectionDropped` after 5 s, and for any other who calls.
    """
    name = _name(sock)
    deadline, own = time.monotonic() + GREETING_S, secrets.token_bytes(NONCE)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1) if sock.family != socket.AF_UNIX else None
        sock.settimeout(GREETING_S)
        sock.sendall(HELLO + own)
        hello = read_exactly(sock, len(HELLO) + NONCE, deadline)
    except OSError as error:
        sock.close()
        raise ConnectionDropped(f"{name} {_why(error, 'did not greet in time')}") from None
    if not hello.startswith(HELLO):
        sock.close()
        raise ConnectionDropped(f"{name} does not speak this protocol")
    other = hello[len(HELLO) :]
    nonces = other + own if called else own + other
    of_caller, of_called = (_proof(secret, b"from " + side, nonces) for side in (b"caller", b"called"))
    peer = Peer(sock, name, (of_called, of_caller) if called else (of_caller, of_called), longest)
    peer.send(b"")
    if peer.receive(max(0.0, deadline - time.monotonic())) is None:
        raise peer.drop("did not greet in time")
    return peer


def call(host: str, port: int, secret: bytes, seconds: float, longest: int = LONGEST) -> Peer:
    """Connect to who listens there, perhaps not yet. `ConnectionDropped` when nobody who knows the secret does in
    time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic()))
            return greet(sock, secret, called=False, longest=longest)
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConnectionDropped(f"{host}:{port} {_why(error, 'does not answer')}") from None
            time.sleep(0.05)


def _proof(key: bytes, head: bytes, payload: bytes) -> bytes:
    # Not one string: a frame may be long, and what is before it has one length.
    code = hmac.new(key, head, hashlib.sha256)
    code.update(payload)
    return code.digest()


def _name(sock: socket.socket) -> str:
    try:
        address = sock.getpeername()
    except OSError:
        return "a caller"
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "a process"


def _why(error: Exception, late: str) -> str:
    if isinstance(error, TimeoutError):
        return late
    return str(error.strerror or error).lower() if isinstance(error, OSError) else "has closed the connection"
