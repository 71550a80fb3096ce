"""Texts that `quire embed` reads, the vectors that it has of an earlier run, and the files that it writes."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.core.errors import BadRequest, ConfigError
from quire.core.files import becoming

MAX_LINE = 16 << 20
"""Bytes of a line."""
NO_FILE = "standard input"
SUFFIXES = (".parquet", ".jsonl", ".npy")
Matrix = NDArray[np.float32]
Batch = tuple[int, list[str]]
"""The number of the first line, from 1, and the texts."""


@contextmanager
def standard_input() -> Iterator[Path]:
    """A file with all of standard input, which is read twice: texts are counted before they are embedded."""
    with tempfile.TemporaryDirectory(prefix="quire-embed-") as folder:
        made = Path(folder) / NO_FILE
        with made.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield made


def shown(path: Path) -> str:
    """What messages call a file of texts."""
    return NO_FILE if path.name == NO_FILE else str(path)


def texts_of(path: Path, field: str) -> Iterator[str]:
    """The texts of a file, one a line, or of the `field` of JSON objects; `BadRequest` names the line."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
            if len(line) > MAX_LINE:
                raise BadRequest(f"{shown(path)}: line {number} is longer than {MAX_LINE} bytes")
            yield _text(line, field, f"{shown(path)}: line {number}")


def _text(line: bytes, field: str, where: str) -> str:
    try:
        if not field:
            return line.removesuffix(b"\n").removesuffix(b"\r").decode()
        found = msgspec.json.decode(line, type=dict[str, Any]).get(field)
    except (UnicodeDecodeError, msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest(f"{where} is no {'JSON object' if field else 'UTF-8 text'}: {error}") from None
    if not isinstance(found, str):
        raise BadRequest(f"{where} has no text as {field!r}; name another by --field")
    return found


def batches_of(path: Path, field: str, size: int) -> Iterator[Batch]:
    """The texts of a file, `size` at a time."""
    texts, first = texts_of(path, field), 1
    while batch := list(islice(texts, size)):
        yield first, batch
        first += len(batch)


class Parts:
    """Vectors of batches in a folder beside the output, so that a run that was cut off goes on.

    A part is found by a digest of its texts and of `how`, which tells the model and the options.
    """

    def __init__(self, target: Path, how: str) -> None:
        self.folder = target.with_name(target.name + ".parts")
        self._how = how
        self.folder.mkdir(exist_ok=True)

    def vectors(self, batch: Batch, make: Callable[[Batch], Matrix]) -> tuple[Matrix, bool]:
        """Vectors of a batch, and whether they were there before; `make` makes them."""
        said = json.dumps([self._how, batch[1]], ensure_ascii=True).encode()
        path = self.folder / f"{hashlib.blake2b(said, digest_size=16).hexdigest()}.npy"
        if path.is_file():
            return np.load(path, allow_pickle=False), True
        made = make(batch)
        with becoming(path) as part, part.open("wb") as file:
            np.save(file, made, allow_pickle=False)
        return made, False

    def remove(self) -> None:
        """Remove the folder, when the output is there."""
        shutil.rmtree(self.folder)


def pyarrow() -> Any:
    """The library of Parquet files; `ConfigError` that names the extra."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            "Parquet needs pyarrow: pip install 'quire[records]', or name a .jsonl or .npy file", param="output_file"
        ) from None
    return pyarrow


def write(target: Path, rows: int, width: int, batches: Iterator[tuple[Sequence[str], Matrix]]) -> None:
    """Write `rows` texts and vectors of `width` numbers as the ending of `target` says, whole or not at all."""
    kinds = {".parquet": _parquet, ".jsonl": _jsonl, ".npy": _npy}
    with becoming(target) as part:
        kinds[target.suffix](part, rows, width, batches)


def _parquet(part: Path, rows: int, width: int, batches: Iterator[tuple[Sequence[str], Matrix]]) -> None:
    arrow = pyarrow()
    kind = arrow.list_(arrow.float32(), width)
    schema = arrow.schema([("text", arrow.string()), ("embedding", kind)])
    with arrow.parquet.ParquetWriter(part, schema) as writer:
        for texts, vectors in batches:
            flat = arrow.FixedSizeListArray.from_arrays(arrow.array(vectors.reshape(-1)), width)
            writer.write_table(arrow.table([arrow.array(texts, arrow.string()), flat], schema=schema))


def _jsonl(part: Path, rows: int, width: int, batches: Iterator[tuple[Sequence[str], Matrix]]) -> None:
    with part.open("wb") as file:
        for texts, vectors in batches:
            for text, vector in zip(texts, vectors, strict=True):
                file.write(msgspec.json.encode({"text": text, "embedding": vector.tolist()}) + b"\n")


def _npy(part: Path, rows: int, width: int, batches: Iterator[tuple[Sequence[str], Matrix]]) -> None:
    with part.open("wb") as file:
        shape = {"descr": "<f4", "fortran_order": False, "shape": (rows, width)}
        np.lib.format.write_array_header_1_0(file, shape)
        for _, vectors in batches:
            file.write(vectors.astype("<f4").tobytes())
