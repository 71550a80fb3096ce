"""A GGUF file (versions 2 and 3, little-endian): header, metadata and tensor infos, read over a memory map.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every count and length is compared with the bytes
that are there before anything of that size is made, so a file that lies costs no more memory than it has bytes.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from quire.core.errors import ModelError
from quire.core.files import shard_number
from quire.gguf.block_types import BLOCKS, REMOVED, BlockType

MAGIC = b"GGUF"
MAX_HEADER = 256 << 20
"""Bytes of metadata and tensor infos; a vocabulary of 256,000 tokens takes about 10 MiB."""
MAX_TENSORS = 1 << 16
MAX_NAME = 1 << 16
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
CLIP = "clip"
"""The `general.architecture` of what makes rows of images."""
_STRING, _ARRAY, _BOOL, _U32 = 8, 9, 7, 4
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8",
            12: "<f8"}  # fmt: skip
_U64 = struct.Struct("<Q")
MAX_ASCII = 127
"""Lengths up to it are a byte that is a character of its own."""


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


def gguf_files(folder: Path) -> list[Path]:
    """The models in GGUF files of a folder that has no config.json, by name: of shards (-00001-of-00003) the first."""
    config = folder / "config.json"
    if config.exists() or config.is_symlink():
        return []
    found = sorted(path for path in folder.glob("*.gguf") if is_gguf(path))
    return [path for path in found if shard_number(path) in (None, 1) and kind_of(path) == "model"]


def kind_of(path: Path) -> str:
    """What a GGUF file holds, by the first entries of its metadata: "model", "mmproj" (what makes rows of images),
    "imatrix" (statistics of activations), or what else it calls itself."""
    with suppress(ModelError):
        data = _map(path)
        at = _Cursor(data, path, min(len(data), MAX_HEADER))
        at.take(len(MAGIC) + 4 + 8, "header")
        general = dict(at.generals(at.integer(8, "metadata count")))
        own = "mmproj" if general.get("general.architecture") == CLIP else "model"
        return str(general.get("general.type", own))
    return "model"


class Metadata(dict[str, Any]):
    """Key -> str, bool, int, float, list of str, or array of numbers. Lists are decoded when they are asked for."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, _Strings):
            value = self[key] = value.entries()
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value or a default, as a dictionary does."""
        try:
            return self[key]
        except KeyError:
            return default

    def count(self, key: str) -> int | None:
        """How many texts the list `key` has; None where it is none."""
        value = super().get(key)
        return len(value) if isinstance(value, (_Strings, list)) else None

    def texts(self, key: str, places: Iterable[int]) -> list[str]:
        """Some texts of a list, of which no others are decoded."""
        value = super().__getitem__(key)
        return [value[i] for i in places]


class GgufFile:
    """One mapped file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = _map(path)
        self.size = len(self.data)
        self.metadata = Metadata()
        self.tensors: dict[str, GgufTensor] = {}
        self._read(_Cursor(self.data, path, min(self.size, MAX_HEADER)))

    def fail(self, field: str, reason: str) -> ModelError:
        """An error that names file and field, for the caller to raise."""
        return ModelError(f"{self.path}: {field}: {reason}")

    def _read(self, at: _Cursor) -> None:
        if at.take(4, "magic") != MAGIC:
            raise self.fail("magic", "is not GGUF; give a GGUF file or a folder with config.json")
        version = at.integer(4, "version")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
            reason = "is big-endian" if swapped else f"is {version}"
            raise self.fail("version", f"{reason}, only 2 and 3 in little-endian order can be read; convert it again")
        tensors, pairs = at.integer(8, "tensor count"), at.integer(8, "metadata count")
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
            what = f"{REMOVED[code]}, which the format lost" if code in REMOVED else f"{code}, which is not known"
            raise self.fail(name, f"has type {what}; known: {known}. Use another file of the model")
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


class _Strings:
    """An array of strings that are still bytes; `starts`: where the length of each lies, and where they all end."""

    def __init__(self, data: mmap.mmap, starts: array[int]) -> None:
        self._data, self._starts = data, starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> str:
        return self._data[self._starts[index] + 8 : self._starts[index + 1]].decode()

    def entries(self) -> list[str]:
        """All strings of the array."""
        base, data = self._starts[0], self._data[self._starts[0] : self._starts[-1]]
        return [data[start + 8 - base : end - base].decode() for start, end in pairwise(self._starts)]

    def undecodable(self) -> int | None:
        """The first that is no text.

        Short ones behind each other are one text if each is one: the bytes of their lengths are below 128.
        """
        sizes = np.diff(np.frombuffer(self._starts, np.uint64)) - 8
        begin = 0
        for long in (*np.flatnonzero(sizes > MAX_ASCII).tolist(), len(self)):
            try:
                self._data[self._starts[begin] : self._starts[long]].decode()
            except UnicodeDecodeError:
                return next(i for i in range(begin, long) if not self._is_text(i))
            if long < len(self) and not self._is_text(long):
                return long
            begin = long + 1
        return None

    def _is_text(self, index: int) -> bool:
        try:
            self[index]
        except UnicodeDecodeError:
            return False
        return True


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

    def integer(self, size: int, field: str) -> int:
        return int.from_bytes(self.take(size, field), "little")

    def string(self, field: str, limit: int = MAX_HEADER) -> str:
        count = self.integer(8, field)
        if count > limit:
            raise self.fail(field, f"has a string of {count} bytes, at most {limit} are read")
        try:
            return self.take(count, field).decode()
        except UnicodeDecodeError:
            raise self.fail(field, "is not UTF-8 text") from None

    def generals(self, count: int) -> Iterator[tuple[str, Any]]:
        """The entries before the first of `count` that is not of the file as a whole."""
        for _ in range(count):
            key, value = self.pair()
            if not key.startswith("general."):
                return
            yield key, value

    def pair(self) -> tuple[str, Any]:
        key = self.string("metadata key", MAX_NAME)
        kind = self.integer(4, key)
        if key == "general.alignment":
            self.alignment_type = kind
        if kind == _STRING:
            return key, self.string(key)
        if kind != _ARRAY:
            return key, self.numbers(kind, 1, key)[0].item()
        inner, count = self.integer(4, key), self.integer(8, key)
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

    def strings(self, count: int, key: str) -> _Strings:
        self.room(count, 8, key)
        data, at, length = self.data, self.at, _U64.unpack_from
        starts = array("Q")
        try:
            for _ in range(count):
                starts.append(at)
                at += 8 + length(data, at)[0]
        except (struct.error, OverflowError):
            at = self.end + 1
        if at > self.end:
            over = next((i for i, start in enumerate(starts) if start > self.end), len(starts)) - 1
            raise self.fail(key, f"entry {over} ends past the header; the file is truncated or damaged")
        starts.append(at)
        found = _Strings(data, starts)
        if (bad := found.undecodable()) is not None:
            raise self.fail(key, f"entry {bad} is not UTF-8 text")
        self.at = at
        return found

    def tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self.string("tensor name", MAX_NAME)
        count = self.integer(4, name)
        if not 1 <= count <= MAX_DIMS:
            raise self.fail(name, f"has {count} dimensions, needs 1 to {MAX_DIMS}")
        dims = tuple(self.integer(8, name) for _ in range(count))
        if 0 in dims:
            raise self.fail(name, f"has the shape {list(dims)}, which holds no number")
        return name, self.integer(4, name), dims, self.integer(8, name)


def _map(path: Path) -> mmap.mmap:
    """The file as private copy-on-write pages: tensors made of it count as writable, the file never changes."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise ModelError(f"{path}: header: the file is shorter than 24 bytes; it is truncated")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
