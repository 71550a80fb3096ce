"""Where the server listens: an address, or a socket in the file system."""

from __future__ import annotations

import contextlib
import errno
import socket
from pathlib import Path

from quire.core.errors import ConfigError
from quire.core.running import servers
from quire.server.server_options import ServerOptions

BACKLOG = 2048


def bind(options: ServerOptions) -> socket.socket:
    """Reserve the address without listening: nothing connects before the model is loaded.

    `ConfigError` if it is taken, or cannot be.
    """
    if options.uds is not None:
        return _bind_file(Path(options.uds))
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((options.host, options.port))
    except OSError as error:
        sock.close()
        raise _address_error(error, options) from None
    return sock


def check_free(options: ServerOptions) -> None:
    """`ConfigError` where the address is taken, or cannot be; nothing stays reserved."""
    if options.uds is None:
        bind(options).close()
    elif _answers(Path(options.uds)):
        raise ConfigError(f"--uds {options.uds}: another program listens there", param="uds")


def _answers(path: Path) -> bool:
    """Whether somebody listens on the socket of that name."""
    if not path.is_socket():
        return False
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        return probe.connect_ex(str(path)) == 0


def _bind_file(path: Path) -> socket.socket:
    """A socket that only this user may connect to. One that a server left behind is replaced."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _answers(path):
            raise OSError(errno.EADDRINUSE, "another program listens there")
        if path.is_socket():
            path.unlink()
        sock.bind(str(path))
        path.chmod(0o600)
    except OSError as error:
        sock.close()
        raise ConfigError(f"--uds {path}: {error.strerror or error}", param="uds") from None
    return sock


def leave(options: ServerOptions) -> None:
    """Remove the socket's file."""
    if options.uds is not None:
        Path(options.uds).unlink(missing_ok=True)


def listen(sock: socket.socket, options: ServerOptions) -> None:
    """Take connections; `ConfigError` when somebody else, who had bound the address too, listens by now."""
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        raise _address_error(error, options) from None


def where(sock: socket.socket, options: ServerOptions) -> str:
    """What clients call it."""
    if options.uds is not None:
        return f"unix:{options.uds}"
    host, port = sock.getsockname()[:2]
    scheme = "https" if options.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _holder(port: int) -> str:
    """Who has the port."""
    for server in servers():
        if server.address.rpartition(":")[2] == str(port):
            return f"quire serve ({', '.join(server.models)}, pid {server.pid}), which quire stop {port} ends"
    return "another program"


def _address_error(error: OSError, options: ServerOptions) -> ConfigError:
    place = options.uds or f"{options.host}:{options.port}"
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"{place} is in use by {_holder(options.port)}; choose another --port", param="port")
    if error.errno == errno.EACCES:
        return ConfigError(f"{place}: not permitted; choose a --port above 1023", param="port")
    return ConfigError(f"--host {options.host}: {error.strerror or error}", param="host")
