"""Addresses of this host's network interfaces."""

from __future__ import annotations

import ipaddress
import socket
import struct

from quire.core.errors import ConfigError

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
