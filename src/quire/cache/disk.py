"""A store on disk: one file a block, read whole and checked, written behind the running engine.
See docs/design/kv-store.md.

A file gets its name when it is whole, so that whoever is killed leaves nothing that is found. Nothing waits for the
disk: what a machine that lost its power did not write, the checksum finds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence as GenericSequence
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np

from quire.cache.store_folder import StoreFolder
from quire.cache.tiers import StoreCounts, StoreKey, StoreSizes

log = logging.getLogger(__name__)
HEADER = Struct("<8sIIQ24s")
"""Magic, CRC-32 of the block and of what follows, tokens, bytes of the block, key; then the tokens and the block."""
MAGIC = b"quirekv1"
CRC_END = 12
PENDING_BYTES = 256 << 20
"""That were taken and are not yet written; what comes beyond is not kept."""
NICE = 10
"""Of the thread that writes: with the lowest priority it got next to nothing of a core that steps keep busy."""
PAUSE_SECONDS = 60.0
"""After a write that failed, as on a full disk."""


class DiskStore:
    """Blocks and states of `sizes` in `folder`, which takes `most` bytes in all."""

    def __init__(self, folder: StoreFolder, sizes: StoreSizes, most: int) -> None:
        self._folder, self._sizes, self._most = folder, sizes, most
        self._pending: OrderedDict[bytes, tuple[tuple[int, ...], Any]] = OrderedDict()
        self._pending_bytes = 0
        self._lock = threading.Lock()
        self._wake, self._writing = threading.Condition(self._lock), threading.Lock()
        self._paused_until = 0.0
        self._closing = False
        self._held = (0, 0)
        self._written = self._bad = self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="quire-kv-write", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> StoreCounts:
        """Bytes and blocks are those of the whole folder, as last seen."""
        return StoreCounts(self._held[1], self._held[0], self._written, self._bad, self._dropped)

    def has(self, key: bytes) -> bool:
        """Whether there is such a file, or will be."""
        return key in self._pending or self._folder.path(key).exists()

    def shared(self, key: bytes) -> bool:
        """Whether there is such a file."""
        return self._folder.path(key).exists()

    def full(self) -> bool:
        """Whether as much waits to be written as may, or the disk takes nothing."""
        waits = self._pending_bytes + max(self._sizes) > PENDING_BYTES and bool(self._pending)
        return waits or time.monotonic() < self._paused_until

    def put(self, key: bytes, tokens: tuple[int, ...], data: Any) -> None:
        """Have it written."""
        with self._lock:
            if self._closing or self.full():
                self._dropped += 1
                return
            self._pending_bytes += 0 if key in self._pending else self._sizes.of(key)
            self._pending[key] = tokens, data
            self._wake.notify()

    def read(self, wanted: GenericSequence[StoreKey]) -> dict[bytes, Any]:
        """The blocks up to the first that is not there. They are then those used last, the deepest a little before."""
        found: dict[bytes, Any] = {}
        for want in wanted:
            waiting = self._pending.get(want.key)
            data = waiting[1] if waiting is not None and waiting[0] == want.tokens else self._load(want)
            if data is None:
                break
            found[want.key] = data
        now = time.time_ns()
        for place, key in enumerate(found):
            with contextlib.suppress(OSError):
                os.utime(self._folder.path(key), ns=(now - place * 1000, now - place * 1000))
        return found

    def forget_all(self) -> None:
        """Nobody finds what was kept, in this process and others that are told so."""
        with self._lock:
            self._drop_pending()
        self._folder.renew()

    def settle(self) -> None:
        """Write a block."""
        if not self._write_next():
            time.sleep(0.005)  # the disk takes nothing

    def close(self, seconds: float) -> None:
        """Write what waits, for so long at most."""
        end = time.monotonic() + seconds
        with self._lock:
            self._closing = True
            self._wake.notify()
        while time.monotonic() < end and self._write_next():  # this thread waits for its turn less than that one
            pass
        with self._lock:
            self._dropped += len(self._pending)
            self._drop_pending()
        self._thread.join(max(0.1, end - time.monotonic()))
        if not self._thread.is_alive():
            self._folder.close()

    def _drop_pending(self) -> None:
        self._pending.clear()
        self._pending_bytes = 0

    # ------------------------------------------------------------------------------------------------------- reading

    def _load(self, want: StoreKey) -> Any:
        """The bytes of a block; None if there is none that is whole and of these tokens, which then is removed."""
        path = self._folder.path(want.key)
        try:
            with path.open("rb", buffering=0) as file:
                head = np.empty(HEADER.size + 8 * len(want.tokens), np.uint8)
                data = np.empty(self._sizes.of(want.key), np.uint8)
                whole = _fill(file.fileno(), head) and _fill(file.fileno(), data) and not file.read(1)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s cannot be read: %s; its tokens are computed", path, error.strerror or error)
            return None
        if whole and head.tobytes() == _head(want.key, want.tokens, data.data):
            return data
        log.warning("%s is damaged; its tokens are computed", path)
        self._bad += 1
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            self._folder.give_back(size)
        return None

    # ------------------------------------------------------------------------------------------------------- writing

    def _run(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        with contextlib.suppress(OSError):
            nbytes, files = self._folder.recount()
            self._held = nbytes, files
        while True:
            with self._lock:
                while not self._pending and not self._closing:
                    self._wake.wait()
                if self._closing:
                    break
            self._write_next()

    def _write_next(self) -> bool:
        """Write what waits longest; whether there was anything. One thread does so at a time."""
        with self._writing:
            with self._lock:
                if not self._pending:
                    return False
                key, (tokens, data) = next(iter(self._pending.items()))
            self._write(key, tokens, data)
            with self._lock:
                if self._pending.pop(key, None) is not None:
                    self._pending_bytes -= self._sizes.of(key)
        return True

    def _write(self, key: bytes, tokens: tuple[int, ...], data: Any) -> None:
        path = self._folder.path(key)
        if path.exists():
            return
        head = _head(key, tokens, memoryview(data))
        size = len(head) + self._sizes.of(key)
        temporary = path.parent / f".{path.name}.{os.getpid()}"
        try:
            self._held = self._folder.reserve(size, self._most)
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._put_down(temporary, head, data)
                temporary.replace(path)
            except OSError:
                temporary.unlink(missing_ok=True)
                self._folder.give_back(size)
                raise
            self._written += 1
        except OSError as error:
            self._dropped += 1
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            reason = error.strerror or error
            log.warning("keys and values are not kept: %s: %s; serving goes on", path.parent, reason)

    def _put_down(self, path: Path, head: bytes, data: Any) -> None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            for part in (memoryview(head), memoryview(data).cast("B")):
                while len(part):
                    part = part[os.write(file, part) :]
        finally:
            os.close(file)


def _head(key: bytes, tokens: tuple[int, ...], data: memoryview) -> bytes:
    """What comes before the bytes of a block."""
    rest = HEADER.pack(MAGIC, 0, len(tokens), data.nbytes, key)[CRC_END:] + array("q", tokens).tobytes()
    return MAGIC + zlib.crc32(rest, zlib.crc32(data)).to_bytes(4, "little") + rest


def _fill(file: int, into: Any) -> bool:
    """Whether the file had so many bytes."""
    part = memoryview(into)
    while len(part):
        got = os.readv(file, [part])
        if not got:
            return False
        part = part[got:]
    return True
