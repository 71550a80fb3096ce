"""The folder of a store: the secret that its keys depend on, whose blocks are whose, and how many bytes there are.

    FOLDER/secret              32 random bytes, readable by its owner alone
    FOLDER/account             bytes and files of all blocks, under a lock that processes share
    FOLDER/NAME/generation     16 random bytes; new ones make all blocks of that name unfindable
    FOLDER/NAME/ab/abcd...     one block, named by its key

NAME stands for all that keys and values depend on beside tokens, adapters and tenants.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from quire.core.errors import ConfigError
from quire.core.machine import foreign

SECRET_BYTES, GENERATION_BYTES = 32, 16
ACCOUNT = struct.Struct("<qq")
PAGE = 4096
"""Files take whole ones of the disk."""
STALE_SECONDS = 600
"""Since the last write to a file without its final name: who wrote it was killed."""
LEAVE = 0.9
"""Of what is allowed, after room was made: looking through all files is to be rare."""


def taken(nbytes: int) -> int:
    """Bytes of the disk that a file of `nbytes` takes."""
    return -(-nbytes // PAGE) * PAGE


class StoreFolder:
    """The part of a folder that is of `facts`, in a generation. `ConfigError` where it cannot be used.

    `chain` is the secret of the hash chain, `home` where blocks lie.
    """

    def __init__(self, folder: Path, facts: str) -> None:
        self.folder = folder
        self._mutex = threading.Lock()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._secret = _kept(folder / "secret", SECRET_BYTES)
            self._account = os.open(folder / "account", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            name = hashlib.blake2b(facts.encode(), key=self._secret, digest_size=16).hexdigest()
            self.home = folder / name
            self.home.mkdir(mode=0o700, exist_ok=True)
            for place in (folder / "secret", self.home):
                if reason := foreign(place):
                    raise ConfigError(f"--kv-store {folder}: {reason}; name a folder of this user's", param="kv_store")
            self._read_generation()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"--kv-store {folder}: {reason}; name a folder that can be written", param="kv_store"
            ) from None

    def _read_generation(self) -> None:
        self._generation = _kept(self.home / "generation", GENERATION_BYTES)
        parts = self.home.name.encode() + self._generation
        self.chain = hashlib.blake2b(parts, key=self._secret, digest_size=32).digest()

    def renew(self) -> None:
        """Make what is there unfindable for whoever calls this, too; it makes room as what is not used does.

        Engines that share the folder are told one after the other: they agree on the generation of the first.
        """
        with self.locked():
            path = self.home / "generation"
            if _kept(path, GENERATION_BYTES) == self._generation:
                path.unlink()
            self._read_generation()

    def path(self, key: bytes) -> Path:
        """Where the block of `key` lies."""
        name = key.hex()
        return self.home / name[:2] / name

    @contextlib.contextmanager
    def locked(self) -> Iterator[FolderUsage]:
        """The account, which no other process has meanwhile."""
        with self._mutex:  # threads of one process have one lock of the file
            fcntl.flock(self._account, fcntl.LOCK_EX)
            try:
                yield FolderUsage(self._account)
            finally:
                fcntl.flock(self._account, fcntl.LOCK_UN)

    def recount(self) -> tuple[int, int]:
        """(bytes, files) that there are; processes that were killed may have left another account."""
        with self.locked() as held:
            held.count(_files(self.folder))
            return held.bytes, held.files

    def reserve(self, nbytes: int, most: int) -> tuple[int, int]:
        """Count a file that is about to be written, once those least recently used have made room for it.

        (bytes, files) that there are with it.
        """
        with self.locked() as held:
            if held.bytes + taken(nbytes) > most:
                held.count(_make_room(_files(self.folder), int(most * LEAVE) - taken(nbytes)))
            held.add(taken(nbytes), 1)
            return held.bytes, held.files

    def give_back(self, nbytes: int, files: int = 1) -> None:
        """Files of `nbytes` bytes each are not there."""
        with self.locked() as held:
            held.add(-files * taken(nbytes), -files)

    def close(self) -> None:
        """Let go of the account."""
        os.close(self._account)


class FolderUsage:
    """Bytes and files of a folder, while they are locked."""

    def __init__(self, file: int) -> None:
        self._file = file
        data = os.pread(file, ACCOUNT.size, 0)
        self.bytes, self.files = ACCOUNT.unpack(data) if len(data) == ACCOUNT.size else (0, 0)

    def add(self, nbytes: int, files: int) -> None:
        """Add so many blocks and bytes."""
        self.bytes, self.files = max(0, self.bytes + nbytes), max(0, self.files + files)
        os.pwrite(self._file, ACCOUNT.pack(self.bytes, self.files), 0)

    def count(self, found: list[tuple[float, int, Path]]) -> None:
        """Count exactly these blocks and bytes."""
        self.bytes = self.files = 0
        self.add(sum(size for _, size, _ in found), len(found))


def _files(folder: Path) -> list[tuple[float, int, Path]]:
    """(last use, bytes taken, path) of all blocks; what writers left that were killed is removed."""
    found = []
    for path in folder.glob("*/[0-9a-f][0-9a-f]/*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if path.name.startswith(".") and time.time() - status.st_mtime > STALE_SECONDS:
                path.unlink()
            else:
                found.append((status.st_mtime, taken(status.st_size), path))
    return found


def _make_room(files: list[tuple[float, int, Path]], most: int) -> list[tuple[float, int, Path]]:
    """Remove the files least recently used until the rest takes `most` bytes; the rest."""
    held = sum(size for _, size, _ in files)
    files.sort(reverse=True)
    while files and held > most:
        _, size, path = files.pop()
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        held -= size
    return files


def _kept(path: Path, count: int) -> bytes:
    """The `count` random bytes that `path` holds, made where there is none; of several makers the first one wins."""
    if not path.exists():
        handle, name = tempfile.mkstemp(dir=path.parent)  # mode 0600
        try:
            os.write(handle, secrets.token_bytes(count))
            with contextlib.suppress(FileExistsError):
                os.link(name, path)
        finally:
            os.close(handle)
            Path(name).unlink()
    status = path.stat()
    if status.st_mode & 0o077:
        raise ConfigError(
            f"--kv-store: {path} can be read by others; chmod 600 it, or remove the folder", param="kv_store"
        )
    data = path.read_bytes()
    if len(data) != count:
        raise ConfigError(f"--kv-store: {path} is damaged; remove the folder {path.parent}", param="kv_store")
    return data
