"""Downloads of one file: they go on where they were cut off, and the file has its name once its digest was checked."""

from __future__ import annotations

import base64
import errno
import fcntl
import hashlib
import http.client
import os
import shutil
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit, urlunsplit

from quire.core.errors import ModelError
from quire.core.files import sync
from quire.core.version import VERSION
from quire.store.progress import DownloadProgress, amount

CHUNK = 1 << 20
"""Bytes that are read at a time."""
TIMEOUT = 60.0
"""Seconds without a byte after which a connection counts as cut."""
ATTEMPTS = 5
"""Connections in a row that may bring nothing new before a download gives up."""
PAUSE = 1.0
"""Seconds before the second connection; each later one waits twice as long."""


class RemoteFile(NamedTuple):
    """A file to download: http, https or file `url`; `sha256` in hexadecimal digits; `size` in bytes, where known."""

    url: str
    sha256: str
    size: int | None = None


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...

    def close(self) -> None: ...


def download(
    file: RemoteFile, target: Path, progress: DownloadProgress, what: str, certificates: str | None = None
) -> None:
    """Have `file` at `target`. What an earlier download left in TARGET.partial is not asked for again.

    `certificates`: a file of authorities to trust instead of the system's. `ModelError` says what was wrong: no
    connection (the part is kept), no space (kept), or another digest (removed).
    """
    part = target.with_name(target.name + ".partial")
    if target.exists():
        target.replace(part)
    digest = hashlib.sha256()
    done = _hash_part(part, digest, file.size)
    check_space(part.parent, (file.size or 0) - done)
    progress.begin(what, file.size, done)
    failed = 0
    while True:
        before = done
        try:
            with part.open("ab") as out:
                done = _go_on(file, out, digest, done, progress, certificates)
        except (OSError, http.client.HTTPException) as error:
            done, reason = part.stat().st_size, error
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _no_space(part.parent, (file.size or done) - done) from None
            if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                raise ModelError(f"{shown(file.url)} cannot be downloaded: {explained(error)}") from None
            digest = hashlib.sha256()
            done = _hash_part(part, digest, file.size)
        else:
            break
        failed = 0 if done > before else failed + 1
        if failed == ATTEMPTS:
            raise ModelError(
                f"{shown(file.url)} cannot be downloaded: {explained(reason)}. Check the network and run the same "
                f"command again: it goes on after {amount(done)}"
            )
        time.sleep(PAUSE * 2**failed)
    if digest.hexdigest() != file.sha256:
        part.unlink()
        raise ModelError(
            f"{shown(file.url)}: wrong digest: its sha256 is {digest.hexdigest()}, not {file.sha256}. The download was "
            "removed; run the same command again. If it fails again, the server has another file than it should"
        )
    sync(part)
    part.replace(target)


def _hash_part(part: Path, digest: hashlib._Hash, size: int | None) -> int:
    """Bytes that are here of an earlier download, which `digest` takes; one that is too long is removed."""
    if not part.exists():
        return 0
    if size is not None and part.stat().st_size > size:
        part.unlink()
        return 0
    with part.open("rb") as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
        return file.tell()


def _go_on(
    file: RemoteFile,
    out: IO[bytes],
    digest: hashlib._Hash,
    done: int,
    progress: DownloadProgress,
    certificates: str | None,
) -> int:
    """Read from byte `done` to the end; the bytes that are here then. `OSError` when the connection is cut."""
    if file.size is not None and done == file.size:
        return done
    try:
        opened, total = _open_at(file.url, done, certificates)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing is behind the last byte that is here
            return done
        raise
    try:
        while piece := opened.read(CHUNK):
            out.write(piece)
            digest.update(piece)
            done += len(piece)
            progress.reach(done)
    finally:
        opened.close()
    out.flush()
    expected = file.size if file.size is not None else total
    if expected is not None and done < expected:
        raise ConnectionError(f"the connection was cut after {done:,} of {expected:,} bytes")
    return done


def _open_at(url: str, start: int, certificates: str | None) -> tuple[_Readable, int | None]:
    """The file from byte `start` on, and how many bytes it has in all where the server says it."""
    if urlsplit(url).scheme == "file":
        path = local_path(url)
        opened = path.open("rb")
        opened.seek(start)
        return opened, path.stat().st_size
    response = open_url(url, {"Range": f"bytes={start}-"} if start else {}, certificates)
    length = response.headers.get("Content-Length")
    if start and response.status != 206:  # a server without ranges sends all of it
        left = start
        while left and (piece := response.read(min(CHUNK, left))):
            left -= len(piece)
        return response, int(length) if length else None
    return response, start + int(length) if length else None


def open_url(
    url: str, headers: dict[str, str], certificates: str | None = None, timeout: float = TIMEOUT
) -> http.client.HTTPResponse:
    """Ask for an http or https address; a user name and password in it become a header. `OSError` as of urllib."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise ModelError(f"{shown(url)}: only http, https and file addresses can be read")
    asked = {"User-Agent": f"quire/{VERSION}"} | headers
    if parts.username is not None:
        given = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        asked["Authorization"] = f"Basic {base64.b64encode(given.encode()).decode()}"
    plain = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    request = urllib.request.Request(plain)
    for name, value in asked.items():  # not sent on to another host when this one redirects
        (request.add_unredirected_header if name == "Authorization" else request.add_header)(name, value)
    context = ssl.create_default_context(cafile=certificates) if parts.scheme == "https" else None
    response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=timeout, context=context)
    return response


def local_path(url: str) -> Path:
    """The path of a file:// address."""
    return Path(unquote(urlsplit(url).path))


def shown(url: str) -> str:
    """An address without the user name and password that it may hold."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))


def explained(error: BaseException) -> str:
    """A connection's failure in words."""
    if isinstance(error, urllib.error.HTTPError):
        return f"the server replies {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return f"no connection ({error.reason})"
    return str(error) or type(error).__name__


def check_space(folder: Path, needed: int) -> None:
    """Refuse, by `ModelError`, what needs more bytes than are free in the folder, or in that which will hold it."""
    while not folder.exists():
        folder = folder.parent
    if needed > shutil.disk_usage(folder).free:
        raise _no_space(folder, needed)


def _no_space(folder: Path, needed: int) -> ModelError:
    free = shutil.disk_usage(folder).free
    return ModelError(
        f"{folder}: no space: {amount(needed)} are needed and {amount(free)} are free. Remove models that you do not "
        "use (quire list, quire rm NAME), or set QUIRE_MODELS to a folder on a larger disk"
    )


@contextmanager
def locked(path: Path, wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock `path` against other processes; `wait()` is called once where another one has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):
            os.close(handle)
