"""A GGUF file (versions 2 and 3, little-endian): header, metadata and tensor infos, read over a memory map.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every count and length is compared with the bytes
that are there before anything of that size is made, so a file that lies costs no more memory than it has bytes.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from quire.core.errors import ModelError
from quire.gguf.blocks import BLOCKS, UNREADABLE, BlockType

MAGIC = b"GGUF"
MAX_HEADER = 256 << 20
"""Bytes of metadata and tensor infos; a vocabulary of 256,000 tokens takes about 10 MiB."""
MAX_TENSORS = 1 << 16
MAX_NAME = 1 << 16
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY, _BOOL, _U32 = 8, 9, 7, 4
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8",
            12: "<f8"}  # fmt: skip
_U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class GgufTensor:
    """What the header says of one tensor: `shape` slowest axis first, `start` in bytes from the start of the file."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    start: int
    nbytes: int


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that begins as GGUF files do; its name says nothing."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


class GgufFile:
    """One mapped file. `metadata`: key -> str, bool, int, float, list of str, or array of numbers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = _map(path)
        self.size = len(self.data)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._read(_Cursor(self.data, path, min(self.size, MAX_HEADER)))

    def fail(self, field: str, reason: str) -> ModelError:
        """An error that names file and field, for the caller to raise."""
        return ModelError(f"{self.path}: {field}: {reason}")

    def _read(self, at: _Cursor) -> None:
        if at.take(4, "magic") != MAGIC:
            raise self.fail("magic", "is not GGUF; give a GGUF file or a folder with config.json")
        version = at.integer("<u4", "version")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
            reason = "is big-endian" if swapped else f"is {version}"
            raise self.fail("version", f"{reason}, only 2 and 3 in little-endian order can be read; convert it again")
        tensors, pairs = at.integer("<u8", "tensor count"), at.integer("<u8", "metadata count")
        if tensors > MAX_TENSORS:
            raise self.fail("tensor count", f"is {tensors}, at most {MAX_TENSORS} are read; the file is damaged")
        at.room(pairs, 13, "metadata count")
        for _ in range(pairs):
            key, value = at.pair()
            if key in self.metadata:
                raise self.fail(key, "is in the metadata twice; the file is damaged")
            self.metadata[key] = value
        at.room(tensors, 24, "tensor count")
        raw = [at.tensor() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if at.alignment_type not in (None, _U32) or alignment < 8 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise self.fail("general.alignment", f"is {alignment!r:.40}, needs a u32 power of two from 8 to 1048576")
        begin = -(-at.at // alignment) * alignment
        for name, kind, shape, offset in raw:
            self._add(name, kind, shape, offset, begin, alignment)
        self._check_overlap()

    def _add(self, name: str, code: int, dims: tuple[int, ...], offset: int, begin: int, alignment: int) -> None:
        if name in self.tensors:
            raise self.fail(name, "is there twice; the file is damaged")
        kind = BLOCKS.get(code)
        if kind is None:
            known = ", ".join(t.name for t in BLOCKS.values())
            raise self.fail(
                name, f"has type {UNREADABLE.get(code, code)}, which cannot be read; known: {known}. Use another file"
            )
        shape = dims[::-1]
        if shape[-1] % kind.numbers:
            raise self.fail(name, f"has rows of {shape[-1]} numbers, {kind.name} has blocks of {kind.numbers}")
        nbytes = kind.nbytes
        for i, n in enumerate(shape):
            nbytes *= n // (kind.numbers if i == len(shape) - 1 else 1)
        if offset % alignment:
            raise self.fail(name, f"lies at {offset}, not a multiple of the alignment {alignment}")
        if begin + offset + nbytes > self.size:
            raise self.fail(
                name,
                f"needs bytes {begin + offset} to {begin + offset + nbytes} of a file of {self.size}; "
                "the file is truncated or its header is wrong: download it again",
            )
        self.tensors[name] = GgufTensor(name, kind, shape, begin + offset, nbytes)

    def _check_overlap(self) -> None:
        ordered = sorted(self.tensors.values(), key=lambda t: t.start)
        for before, after in pairwise(ordered):
            if before.start + before.nbytes > after.start:
                raise self.fail(after.name, f"overlaps tensor {before.name}; the file is damaged")


class _Cursor:
    """Reads the header from the front; nothing is read past `end`."""

    def __init__(self, data: mmap.mmap, path: Path, end: int) -> None:
        self.data = data
        self.path = path
        self.end = end
        self.at = 0
        self.alignment_type: int | None = None

    def fail(self, field: str, reason: str) -> ModelError:
        return ModelError(f"{self.path}: {field}: {reason}")

    def room(self, count: int, each: int, field: str) -> None:
        """Refuse `count` things of at least `each` bytes where the rest of the header cannot hold them."""
        if count * each > self.end - self.at:
            raise self.fail(
                field,
                f"asks for {count} entries of {each} or more bytes, {self.end - self.at} bytes are left; "
                "the file is truncated or damaged: download it again",
            )

    def take(self, count: int, field: str) -> bytes:
        self.room(count, 1, field)
        self.at += count
        return self.data[self.at - count : self.at]

    def integer(self, form: str, field: str) -> int:
        dtype = np.dtype(form)
        return int(np.frombuffer(self.take(dtype.itemsize, field), dtype)[0])

    def string(self, field: str, limit: int = MAX_HEADER) -> str:
        count = self.integer("<u8", field)
        if count > limit:
            raise self.fail(field, f"has a string of {count} bytes, at most {limit} are read")
        try:
            return self.take(count, field).decode()
        except UnicodeDecodeError:
            raise self.fail(field, "is not UTF-8 text") from None

    def pair(self) -> tuple[str, Any]:
        key = self.string("metadata key", MAX_NAME)
        kind = self.integer("<u4", key)
        if key == "general.alignment":
            self.alignment_type = kind
        if kind == _STRING:
            return key, self.string(key)
        if kind != _ARRAY:
            return key, self.numbers(kind, 1, key)[0].item()
        inner, count = self.integer("<u4", key), self.integer("<u8", key)
        return key, self.strings(count, key) if inner == _STRING else self.numbers(inner, count, key)

    def numbers(self, kind: int, count: int, key: str) -> np.ndarray[Any, Any]:
        if kind not in _SCALARS:
            raise self.fail(key, "is an array of arrays" if kind == _ARRAY else f"has the unknown value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        self.room(count, dtype.itemsize, key)
        raw = self.take(count * dtype.itemsize, key)
        if kind == _BOOL and raw.strip(b"\0\1"):
            raise self.fail(key, "has a truth value that is neither 0 nor 1")
        return np.frombuffer(raw, dtype)

    def strings(self, count: int, key: str) -> list[str]:
        self.room(count, 8, key)
        data, at, end, length = self.data, self.at, self.end, _U64.unpack_from
        out: list[str] = []
        try:
            for _ in range(count):
                (size,) = length(data, at)
                stop = at + 8 + size
                if stop > end:
                    raise self.fail(key, f"entry {len(out)} ends past the header; the file is truncated or damaged")
                out.append(data[at + 8 : stop].decode())
                at = stop
        except UnicodeDecodeError:
            raise self.fail(key, f"entry {len(out)} is not UTF-8 text") from None
        except struct.error:
            raise self.fail(key, f"entry {len(out)} ends past the file; it is truncated or damaged") from None
        self.at = at
        return out

    def tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self.string("tensor name", MAX_NAME)
        count = self.integer("<u4", name)
        if not 1 <= count <= MAX_DIMS:
            raise self.fail(name, f"has {count} dimensions, needs 1 to {MAX_DIMS}")
        dims = tuple(self.integer("<u8", name) for _ in range(count))
        if 0 in dims:
            raise self.fail(name, f"has the shape {list(dims)}, which holds no number")
        return name, self.integer("<u4", name), dims, self.integer("<u8", name)


def _map(path: Path) -> mmap.mmap:
    """The file as private copy-on-write pages: tensors made of it count as writable, the file never changes."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise ModelError(f"{path}: header: the file is shorter than 24 bytes; it is truncated")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
