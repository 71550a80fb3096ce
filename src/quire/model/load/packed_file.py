"""The file of a packed cache: safetensors whose metadata holds an index and a checksum of every piece.

Reading goes through `read` into huge-page memory, not through a mapping: a file that is cut while it is read gives an
error instead of a bus error, and the kernels stream from huge pages. CRC-32 of each 4 MiB finds damage (a flipped bit
always, random garbage but for one case in 2^32 a piece); it is no defence against someone who forges the file, who
could as well change the model beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from quire.core.config import cpu_count
from quire.core.files import LoadProgress
from quire.ops.arrays import AnyArray, to_numpy

FORMAT = 2
PIECE = 4 << 20
ALIGN = 256
MAX_HEADER = 64 << 20
FACTS_BYTES, MATRIX_BYTES, CHECKSUM_BYTES = 4096, 4096, 16
"""Of the index: room for what it says of the file, of a matrix (a tenth of it is used) and of a piece."""


class DamagedCache(Exception):
    """The file cannot be used; the message says why."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One packed matrix: its kind and shape, and of each of its parts (codes, scales, ...; its bias) where it lies.

    `parts`: name -> (bytes from the first, bytes); `wide`: scales are f32; `activation_bits`: 8 or 16.
    """

    kind: str
    n: int
    k: int
    group: int
    wide: bool
    activation_bits: int
    parts: dict[str, tuple[int, int]]


class Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file holds. `source`: fingerprint of everything the numbers depend on; `crcs`: of each piece of `size`."""

    format: int
    source: str
    size: int
    crcs: tuple[int, ...]
    entries: dict[str, Entry]


def read_index(path: Path) -> tuple[Index, int]:
    """The index and the offset of the data; `DamagedCache` when there is none or it does not fit the file."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER:
                raise DamagedCache("its header is too long")
            header = json.loads(file.read(length))
            actual = file.seek(0, os.SEEK_END)
        index = msgspec.json.decode(header["__metadata__"]["quire"], type=Index)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise DamagedCache(f"its header cannot be read ({type(error).__name__})") from None
    if index.format != FORMAT or index.size < 0 or actual != 8 + length + index.size:
        raise DamagedCache(f"it has {actual:,} bytes of format {index.format}, its index says otherwise")
    if len(index.crcs) != -(-index.size // PIECE):
        raise DamagedCache("its checksums do not cover it")
    for entry in index.entries.values():
        if any(a < 0 or s < 0 or a + s > index.size or a % ALIGN for a, s in entry.parts.values()):
            raise DamagedCache("its index points outside of it")
    return index, 8 + length


def read_data(path: Path, offset: int, index: Index, into: AnyArray, progress: LoadProgress) -> None:
    """Read and check all data into `into` (uint8 [index.size]) on all cores; `DamagedCache` when a checksum differs."""
    view = to_numpy(into).data
    done = 0

    def piece(number: int) -> int:
        begin = number * PIECE
        part = view[begin : min(begin + PIECE, index.size)]
        at = 0
        while at < len(part):
            got = _read_at(file.fileno(), part[at:], offset + begin + at)
            if got == 0:
                raise DamagedCache("it ends early")
            at += got
        if zlib.crc32(part) != index.crcs[number]:
            raise DamagedCache(f"the checksum of bytes {begin:,} to {begin + len(part):,} differs")
        return len(part)

    with path.open("rb") as file, ThreadPoolExecutor(cpu_count()) as pool:
        for size in pool.map(piece, range(len(index.crcs))):
            done += size
            progress(done, index.size, "packed weights")


def _read_at(file: int, into: memoryview, offset: int) -> int:
    """Bytes read into `into`, 0 at the file's end; through a copy where the system (macOS before 11) has no preadv."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [into], offset)
    data = os.pread(file, len(into), offset)
    into[: len(data)] = data
    return len(data)


class Writer:
    """Writes a file matrix by matrix, beside `path`; `finish` names it so: a reader sees the old one or the new one.

    safetensors begins with the index, which is known last: room for `matrices` of them and `nbytes` of data is left.
    `between` is called after each piece. OSError from any call when something cannot be done; `abandon` then leaves
    nothing behind.
    """

    def __init__(self, path: Path, source: str, matrices: int, nbytes: int, between: Callable[[], None]) -> None:
        self._path, self._source, self._between = path, source, between
        self._room = FACTS_BYTES + matrices * MATRIX_BYTES + nbytes // PIECE * CHECKSUM_BYTES
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        self._temporary, self._file = Path(name), os.fdopen(handle, "wb")
        self._file.seek(8 + self._room)
        self._entries: dict[str, Entry] = {}
        self._tensors: dict[str, object] = {}
        self._size = self._crc = 0
        self._crcs: list[int] = []

    def add(self, name: str, entry: Entry, buffers: Mapping[str, AnyArray]) -> None:
        """Write one matrix; its entry is kept with the places of its buffers."""
        places = {}
        for part, buffer in buffers.items():
            data = np.ascontiguousarray(to_numpy(buffer)).reshape(-1).view(np.uint8).data
            places[part] = self._size, len(data)
            pad = -len(data) % ALIGN
            for key, size, chunk in ((f"{name}.{part}", len(data), data), (f"{name}.{part}.pad", pad, bytes(pad))):
                if size:
                    span = [self._size, self._size + size]
                    self._tensors[key] = {"dtype": "U8", "shape": [size], "data_offsets": span}
                    self._append(memoryview(chunk))
        self._entries[name] = msgspec.structs.replace(entry, parts=places)

    def finish(self) -> None:
        """Write the index and rename the file. Of several writers the last one wins.

        Nothing waits for the disk: of a machine that loses its power then, the checksums find what was not written.
        """
        crcs = (*self._crcs, self._crc) if self._size % PIECE else tuple(self._crcs)
        index = Index(format=FORMAT, source=self._source, size=self._size, crcs=crcs, entries=self._entries)
        metadata = {"format": "pt", "quire": msgspec.json.encode(index).decode()}
        header = json.dumps({"__metadata__": metadata} | self._tensors, separators=(",", ":")).encode()
        if len(header) > self._room:
            raise OSError(f"its index has {len(header)} bytes, room was left for {self._room}")
        with self._file:
            self._file.seek(0)
            self._file.write(self._room.to_bytes(8, "little") + header.ljust(self._room))
        self._temporary.replace(self._path)

    def abandon(self) -> None:
        """Leave nothing behind."""
        self.remove()
        with contextlib.suppress(OSError):  # of what is still to be flushed
            self._file.close()

    def remove(self) -> None:
        """Take its name from the file, which another thread may be writing; `finish` then fails."""
        self._temporary.unlink(missing_ok=True)

    def _append(self, chunk: memoryview) -> None:
        """Write the bytes and count them in the CRC-32 of every `PIECE`."""
        while len(chunk):
            part = chunk[: PIECE - self._size % PIECE]
            self._file.write(part)
            self._crc, self._size, chunk = zlib.crc32(part, self._crc), self._size + len(part), chunk[len(part) :]
            if self._size % PIECE == 0:
                self._crcs.append(self._crc)
                self._crc = 0
                self._between()
