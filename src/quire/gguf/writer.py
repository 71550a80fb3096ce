"""Writes a GGUF file (version 3, little-endian), one tensor at a time: it is there whole or not at all.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. `quire.gguf.file` reads it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quire.core.errors import ConfigError
from quire.core.files import becoming
from quire.gguf.block_types import BLOCKS, BlockType
from quire.gguf.file import DEFAULT_ALIGNMENT, MAGIC

TYPES = {kind.name: (code, kind) for code, kind in BLOCKS.items()}
"""Name of a type -> its code in the file and its layout."""
_U32, _I64, _U64, _F32, _BOOL, _STRING, _ARRAY = 4, 11, 10, 6, 7, 8, 9
_NUMBERS = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10, "i8": 11, "f8": 12}


MOST_FILES = (1 << 16) - 1


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written: its name, type ("Q4_K") and shape, slowest axis first."""

    name: str
    type: str
    shape: tuple[int, ...]

    @property
    def kind(self) -> BlockType:
        """How its numbers lie."""
        return TYPES[self.type][1]

    @property
    def nbytes(self) -> int:
        """Bytes of its data; `ConfigError` for rows that are no whole number of blocks."""
        if self.shape[-1] % self.kind.numbers:
            raise ConfigError(
                f"{self.name} has rows of {self.shape[-1]} numbers, {self.type} has blocks of {self.kind.numbers}"
            )
        return math.prod(self.shape) // self.kind.numbers * self.kind.nbytes


def write_file(
    path: Path, metadata: Mapping[str, Any], tensors: Sequence[NewTensor], data: Iterable[np.ndarray[Any, Any]]
) -> None:
    """Write the file `path`: `data` gives each tensor's bytes in turn, as an array of any dtype.

    Values of `metadata` are bool, int, float (kept in 32 bits), whole numbers of numpy, str, lists of str, or arrays
    [n] of numbers. `path`
    appears, or is replaced, when everything is on disk; until then the bytes are in a file beside it, which no failure
    leaves behind. `ConfigError` where the system refuses to write, or a tensor has other bytes than `tensors` says.
    """
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    header = _header(metadata, tensors, alignment)
    try:
        with becoming(path) as part, part.open("wb") as file:
            file.write(header + bytes(-len(header) % alignment))
            for tensor, array in zip(tensors, data, strict=True):
                _write_one(file, tensor, array, alignment)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}; make room or name another") from None


def write_files(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[NewTensor],
    data: Iterable[np.ndarray[Any, Any]],
    most: int,
) -> list[Path]:
    """Work as `write_file` for files of at most `most` bytes of tensors (a larger tensor has one of its own).

    One file is `path` itself. Of several, NAME.gguf becomes NAME-00001-of-00003.gguf and so on: the first has all of
    the metadata, and each has its number, as llama-gguf-split writes them. Returns the files.
    """
    parts = _parts(tensors, most)
    if len(parts) == 1:
        write_file(path, metadata, tensors, data)
        return [path]
    arrays, written = iter(data), list[Path]()
    for number, part in enumerate(parts):
        own = {"split.no": np.uint16(number), "split.count": np.uint16(len(parts)),
               "split.tensors.count": np.int32(len(tensors))}  # fmt: skip
        facts = dict(metadata) if number == 0 else {}
        written.append(path.with_name(f"{path.stem}-{number + 1:05}-of-{len(parts):05}{path.suffix}"))
        write_file(written[-1], facts | own, part, islice(arrays, len(part)))
    return written


def _parts(tensors: Sequence[NewTensor], most: int) -> list[list[NewTensor]]:
    """The tensors of each file, in order."""
    parts, taken = list[list[NewTensor]](), 0
    for tensor in tensors:
        if not parts or taken + tensor.nbytes > most:
            parts.append([])
            taken = 0
        parts[-1].append(tensor)
        taken += tensor.nbytes
    if len(parts) > MOST_FILES:
        raise ConfigError(f"files of {most} bytes would be {len(parts)}, and a number has five digits; give more bytes")
    return parts


def _write_one(file: BinaryIO, tensor: NewTensor, array: np.ndarray[Any, Any], alignment: int) -> None:
    if array.nbytes != tensor.nbytes:
        raise ConfigError(f"{tensor.name} has {array.nbytes} bytes, {tensor.type} {list(tensor.shape)} takes "
                          f"{tensor.nbytes}")  # fmt: skip
    file.write(np.ascontiguousarray(array).data)
    file.write(bytes(-tensor.nbytes % alignment))


def _header(metadata: Mapping[str, Any], tensors: Sequence[NewTensor], alignment: int) -> bytes:
    out = bytearray(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        out += _string(key) + _value(key, value)
    offset = 0
    for tensor in tensors:
        dims = tensor.shape[::-1]
        out += _string(tensor.name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        out += struct.pack("<IQ", TYPES[tensor.type][0], offset)
        offset += tensor.nbytes + -tensor.nbytes % alignment
    return bytes(out)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(key: str, value: Any) -> bytes:
    """The type of a value, and the value."""
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        kind, form = (_U32, "I") if 0 <= value < 1 << 32 else (_U64, "Q") if value >= 0 else (_I64, "q")
        return struct.pack(f"<I{form}", kind, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, np.integer):
        return struct.pack("<I", _NUMBERS[value.dtype.str[1:]]) + value.tobytes()
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_string, value))
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.str[1:] in _NUMBERS:
        return struct.pack("<IIQ", _ARRAY, _NUMBERS[value.dtype.str[1:]], len(value)) + value.tobytes()
    raise ConfigError(f"{key}: {type(value).__name__} has no form in GGUF metadata")
