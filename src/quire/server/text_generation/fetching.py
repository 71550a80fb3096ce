"""Images by http and https, from the hosts that `--allow-media-url` names alone.

Who sends a URL chooses where this machine connects to, so: a host that is not named is never resolved; a name must
resolve to addresses of the public internet, and the connection goes to the address that was looked at; each redirect is
looked at again; nothing is sent along but the request itself, no cookies, no keys, through no proxy; time and size are
bounded as a whole, whatever the other side does.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import NamedTuple
from urllib.parse import SplitResult, urljoin, urlsplit

from quire.core.errors import BadRequest, ConfigError
from quire.core.version import VERSION
from quire.features.images.edge_image_sources import too_large

REDIRECTS = 3
MAX_URL = 8192
_CHUNK = 64 << 10
_MOVED = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_GLOBAL = ipaddress.ip_network("2000::/3")
"""All of IPv6 that is given out to networks of the internet."""
_SPECIAL_IPV4 = tuple(map(ipaddress.IPv4Network, (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24",
    "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
)))  # fmt: skip
_SPECIAL_IPV6 = tuple(map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "2620:4f:8000::/48", "3fff::/20")))
"""IANA's registries of special purposes whole (iana-ipv4-special-registry, iana-ipv6-special-registry), with multicast
and relays: what Python's `is_global` says of them depends on its version. Outside of `_GLOBAL` none is public."""
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Host(NamedTuple):
    """A host that may be asked, by its name or address in small letters; `port` None = any port of it."""

    name: str
    port: int | None


@dataclass(frozen=True)
class Rules:
    """Who may be asked for images, how many bytes one may have, and seconds that it may take with its redirects."""

    hosts: tuple[Host, ...]
    limit: int
    seconds: float

    def allows(self, name: str, port: int) -> bool:
        """Whether this host was named."""
        return any(host.name == name and host.port in (None, port) for host in self.hosts)


def read_hosts(given: Sequence[str]) -> tuple[Host, ...]:
    """The hosts of `--allow-media-url`: HOST or HOST:PORT, with commas between; `ConfigError` for what is none."""
    words = [word.strip() for each in given for word in each.split(",")]
    return tuple(_host(word) for word in words if word)


def _host(word: str) -> Host:
    try:
        parts = urlsplit(f"//{word}")
        name, port = parts.hostname, parts.port
    except ValueError:
        name, port = None, None
    if not name or "@" in word or "*" in word or parts.path or parts.query or parts.fragment:
        raise ConfigError(
            f"--allow-media-url {word[:200]!r}: name hosts as HOST or HOST:PORT, without scheme, path or wildcard",
            param="allow_media_url",
        )
    return Host(_spelled(name), port)


def _spelled(name: str) -> str:
    """A host's name as it is compared: in small letters, ASCII, without a dot at its end."""
    try:
        return name.rstrip(".").encode("idna").decode().lower()
    except UnicodeError:
        return name.lower()


class FetchCancellation:
    """Whether anybody waits for what is fetched; once nobody does, the connection ends, and none begins."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        self._wanted = True

    def end(self) -> None:
        """Nobody waits any more. From any thread."""
        with self._lock:
            self._wanted = False
            connection = self._connection
        if connection is not None:
            connection.cut()

    def by(self, connection: _Connection) -> None:
        """Take the connection that it comes by; `TimeoutError` where nobody waits for it."""
        with self._lock:
            self._connection = connection
            if not self._wanted:
                raise TimeoutError


def fetch(url: str, where: str, rules: Rules, wanted: FetchCancellation | None = None) -> bytes:
    """The bytes behind `url`, which came in the field `where`. `BadRequest` says why there are none."""
    end, wanted = time.monotonic() + rules.seconds, wanted or FetchCancellation()
    try:
        for _ in range(REDIRECTS + 1):
            connection = _Connection(_target(url, where, rules), where, rules, end)
            wanted.by(connection)
            moved, data = _ask(connection, where, rules, end)
            if not moved:
                return data
            url = urljoin(url, moved)
    except TimeoutError:
        raise _refusal(where, f"the image did not come within {rules.seconds:g} s") from None
    except (OSError, HTTPException, ValueError) as error:
        if time.monotonic() >= end:
            raise _refusal(where, f"the image did not come within {rules.seconds:g} s") from None
        raise _refusal(where, f"the host did not answer as it should ({type(error).__name__})") from None
    raise _refusal(where, f"more than {REDIRECTS} redirects")


class _Target(NamedTuple):
    parts: SplitResult
    name: str
    port: int

    @property
    def path(self) -> str:
        """What is asked for."""
        return (self.parts.path or "/") + (f"?{self.parts.query}" if self.parts.query else "")


def _target(url: str, where: str, rules: Rules) -> _Target:
    """Who is asked; `BadRequest` for a host that was not named, or a URL that is none."""
    if len(url) > MAX_URL or not url.isascii() or any(c <= " " or c == "\x7f" for c in url):
        raise _refusal(where, f"a URL has at most {MAX_URL} ASCII characters, and no spaces")
    try:
        parts = urlsplit(url)
        name, port = parts.hostname, parts.port
    except ValueError:
        raise _refusal(where, "the URL cannot be read") from None
    if parts.scheme not in _PORTS or not name or parts.username is not None or parts.password is not None:
        raise _refusal(where, "the URL must be http:// or https://, with a host and without a user")
    target = _Target(parts, _spelled(name), _PORTS[parts.scheme] if port is None else port)
    if not rules.allows(target.name, target.port):
        told = "is not named" if rules.hosts else "cannot be asked: this server fetches nothing unless hosts are named"
        raise _refusal(where, f"the host {name[:100]!r} {told} (--allow-media-url)")
    return target


def _ask(connection: _Connection, where: str, rules: Rules, end: float) -> tuple[str, bytes]:
    """Where the image is instead, or its bytes."""
    target = connection.target
    with contextlib.closing(connection), connection.bounded(end), contextlib.ExitStack() as held:
        headers = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": f"quire/{VERSION}"}
        connection.request("GET", target.path, headers=headers | {"Connection": "close"})
        response = held.enter_context(contextlib.closing(connection.getresponse()))
        if response.status in _MOVED:
            moved = response.getheader("location") or ""
            secure = urlsplit(urljoin(target.parts.geturl(), moved)).scheme == "https"
            if not moved or (target.parts.scheme == "https" and not secure):
                raise _refusal(where, "a redirect leads nowhere, or from https to http")
            return moved, b""
        if response.status != 200:
            raise _refusal(where, f"the host answered with status {response.status}")
        if (response.getheader("content-encoding") or "identity").lower() != "identity":
            raise _refusal(where, "the host sent the image compressed once more")
        return "", _body(response, where, rules.limit, end)


def _body(response: HTTPResponse, where: str, limit: int, end: float) -> bytes:
    told = response.length  # None where the end of the connection or of chunks says it
    if (told or 0) > limit:
        raise too_large(where, limit)
    data = bytearray()
    while told is None or len(data) < told:
        chunk = response.read1(_CHUNK if told is None else min(_CHUNK, told - len(data)))
        if time.monotonic() >= end:
            raise TimeoutError
        if not chunk:
            break
        data += chunk
        if len(data) > limit:
            raise too_large(where, limit)
    if len(data) < (told or 0):
        raise _refusal(where, "the host ended before the image did")
    return bytes(data)


class _Connection(HTTPConnection):
    """Connection to an address that was looked at, by whatever name it goes."""

    def __init__(self, target: _Target, where: str, rules: Rules, end: float) -> None:
        super().__init__(target.parts.netloc.rpartition("@")[2], timeout=max(0.01, end - time.monotonic()))
        self.target, self._where, self._end = target, where, end
        self._other: socket.socket | None = None
        self._late = False

    def connect(self) -> None:
        """Try the addresses of the host that may be connected to, in their order."""
        sock = self._reached()
        self._other = sock.dup()  # TLS takes the first one, from its handshake on
        self.sock = sock
        if self._late:
            raise TimeoutError
        if self.target.parts.scheme == "https":
            self.sock = _trust().wrap_socket(sock, server_hostname=self.target.name)

    def _reached(self) -> socket.socket:
        failed: OSError = OSError("no address")
        for address in _addresses(self.target, self._where):
            left = self._end - time.monotonic()
            if left <= 0:
                raise TimeoutError
            try:
                return socket.create_connection((str(address), self.target.port), left)
            except OSError as error:
                failed = error
        raise failed

    @contextlib.contextmanager
    def bounded(self, end: float) -> Iterator[None]:
        """End the connection at `end`: a byte now and then would never let a single read take too long."""
        timer = threading.Timer(max(0.0, end - time.monotonic()), self.cut)
        timer.daemon = True
        timer.start()
        try:
            yield
            if self._late:
                raise TimeoutError
        finally:
            timer.cancel()
            if self._other is not None:  # `close` is called before the body is read
                self._other.close()

    def cut(self) -> None:
        """End it, whatever it waits for. From any thread."""
        self._late = True
        if self._other is not None:
            with contextlib.suppress(OSError):
                self._other.shutdown(socket.SHUT_RDWR)


@cache
def _trust() -> ssl.SSLContext:
    """Reading the certificates of authorities takes 10 ms."""
    return ssl.create_default_context()


def _addresses(target: _Target, where: str) -> list[Address]:
    """The addresses of a host that may be connected to: one that was named as an address, else public ones."""
    with contextlib.suppress(ValueError):
        return [ipaddress.ip_address(target.name)]  # it was named as this very address
    found = socket.getaddrinfo(target.name, target.port, type=socket.SOCK_STREAM)
    addresses = [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]
    public = [address for address in dict.fromkeys(addresses) if is_public(address)]
    if not public:
        raise _refusal(where, "the host has no address of the public internet; name its address in --allow-media-url")
    return public


def is_public(address: Address) -> bool:
    """Whether an address is of the public internet; those that hold another one (IPv4 in IPv6) are as that is."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        return address in _GLOBAL and not any(address in network for network in _SPECIAL_IPV6)
    return not any(address in network for network in _SPECIAL_IPV4)


def _refusal(where: str, told: str) -> BadRequest:
    return BadRequest(f"{where}: {told}", param=where)
