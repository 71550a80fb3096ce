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
import time
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from quire.core.config import cpu_count
from quire.core.progress import LoadProgress

FORMAT = 2
PIECE = 4 << 20
ALIGN = 256
MAX_HEADER = 64 << 20
STALE_TEMPORARY_SECONDS = 3600


class Damaged(Exception):
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
    """The index and the offset of the data; `Damaged` when there is none or it does not fit the file."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER:
                raise Damaged("its header is too long")
            header = json.loads(file.read(length))
            actual = file.seek(0, os.SEEK_END)
        index = msgspec.json.decode(header["__metadata__"]["quire"], type=Index)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise Damaged(f"its header cannot be read ({type(error).__name__})") from None
    if index.format != FORMAT or index.size < 0 or actual != 8 + length + index.size:
        raise Damaged(f"it has {actual:,} bytes of format {index.format}, its index says otherwise")
    if len(index.crcs) != -(-index.size // PIECE):
        raise Damaged("its checksums do not cover it")
    for entry in index.entries.values():
        if any(a < 0 or s < 0 or a + s > index.size or a % ALIGN for a, s in entry.parts.values()):
            raise Damaged("its index points outside of it")
    return index, 8 + length


def read_data(path: Path, offset: int, index: Index, into: Tensor, progress: LoadProgress) -> None:
    """Read and check all data into `into` (uint8 [index.size]) on all cores; `Damaged` when a checksum differs."""
    view = into.numpy().data
    done = 0

    def piece(number: int) -> int:
        begin = number * PIECE
        part = view[begin : min(begin + PIECE, index.size)]
        at = 0
        while at < len(part):
            got = _read_at(file.fileno(), part[at:], offset + begin + at)
            if got == 0:
                raise Damaged("it ends early")
            at += got
        if zlib.crc32(part) != index.crcs[number]:
            raise Damaged(f"the checksum of bytes {begin:,} to {begin + len(part):,} differs")
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


def write(path: Path, source: str, matrices: dict[str, tuple[Entry, Mapping[str, Tensor]]]) -> None:
    """Write the file beside `path` and rename it when all of it is on disk: a reader sees the old one or the new one.

    Each entry is written with the places of its buffers. OSError when that cannot be done; nothing is left behind.
    """
    entries: dict[str, Entry] = {}
    tensors: dict[str, object] = {}
    chunks: list[memoryview] = []
    at = 0
    for name, (entry, buffers) in matrices.items():
        places = {}
        for part, buffer in buffers.items():
            data = buffer.contiguous().view(-1).view(torch.uint8).numpy().data
            places[part] = at, len(data)
            pad = -len(data) % ALIGN
            for key, size in ((f"{name}.{part}", len(data)), (f"{name}.{part}.pad", pad)):
                if size:
                    tensors[key] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
                    at += size
            chunks += [data, memoryview(bytes(pad))]
        entries[name] = msgspec.structs.replace(entry, parts=places)
    index = Index(format=FORMAT, source=source, size=at, crcs=tuple(_checksums(chunks)), entries=entries)
    metadata = {"format": "pt", "quire": msgspec.json.encode(index).decode()}
    header = json.dumps({"__metadata__": metadata} | tensors, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    _replace(path, [memoryview(len(header).to_bytes(8, "little") + header), *chunks])


def _checksums(chunks: list[memoryview]) -> list[int]:
    """CRC-32 of every `PIECE` bytes of the chunks in a row."""
    found, crc, filled = [], 0, 0
    for chunk in chunks:
        while len(chunk):
            part = chunk[: PIECE - filled]
            crc, filled, chunk = zlib.crc32(part, crc), filled + len(part), chunk[len(part) :]
            if filled == PIECE:
                found.append(crc)
                crc = filled = 0
    return [*found, crc] if filled else found


def _replace(path: Path, chunks: list[memoryview]) -> None:
    """Atomically: a temporary file of our own, synced, renamed. Of several writers the last one wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{path.name}.*"):  # by writers that were killed
        with contextlib.suppress(FileNotFoundError):  # that one is done
            if time.time() - left.stat().st_mtime > STALE_TEMPORARY_SECONDS:
                left.unlink()
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
