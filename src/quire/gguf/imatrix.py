"""Importance of columns as llama-imatrix writes it: mean squares of the activations that a matrix was multiplied with.

Newer files are GGUF: for each matrix the sums of squares of its columns, and of how many tokens these are. Older ones
(.dat) are a list of names and sums, of all experts of a layer in a row, which are divided by one number of calls.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from quire.core.errors import ModelError
from quire.core.files import read_bounded
from quire.gguf.file import GgufFile, is_gguf

Importance = dict[str, np.ndarray[Any, Any]]
"""Name of a matrix in GGUF files ("blk.0.attn_q.weight") -> f32 [experts, columns], or [1, columns]."""
SUMS, COUNTS = ".in_sum2", ".counts"
MAX_BYTES = 1 << 30
MAX_NAME = 1 << 12


def read_imatrix(path: Path) -> Importance:
    """The importance that `path` holds, in either form; `ModelError` for what is neither, and for what is damaged."""
    if not path.is_file():
        raise ModelError(f"{path}: no such file; llama-imatrix writes one")
    found = _of_gguf(GgufFile(path)) if is_gguf(path) else _of_list(path)
    for name, columns in found.items():
        if not (np.isfinite(columns).all() and (columns >= 0).all()):
            raise ModelError(f"{path}: {name}: has numbers below 0, nan or inf; the file is damaged")
    return found


def _of_gguf(file: GgufFile) -> Importance:
    found: Importance = {}
    for name, tensor in file.tensors.items():
        if not name.endswith(SUMS):
            continue
        base = name.removesuffix(SUMS)
        counted = file.tensors.get(base + COUNTS)
        if counted is None or {tensor.type.name, counted.type.name} != {"F32"}:
            raise file.fail(name, f"needs F32 numbers, and {base}{COUNTS} beside it")
        counts = np.frombuffer(file.data, "<f4", counted.nbytes // 4, counted.start)
        sums = np.frombuffer(file.data, "<f4", tensor.nbytes // 4, tensor.start)
        if len(sums) % len(counts):
            raise file.fail(name, f"has {len(sums)} numbers for {len(counts)} matrices")
        found[base] = _mean(sums.reshape(len(counts), -1), counts)
    if not found:
        raise file.fail("tensors", f"none ends with {SUMS}: it is no file of llama-imatrix")
    return found


def _mean(sums: Any, counts: Any) -> Any:
    """Sums by row over how many tokens they are of; 1 for all columns of experts that no token chose."""
    some = counts > 0
    return np.where(some[:, None], sums / np.where(some, counts, np.float32(1))[:, None], np.float32(1))


def _of_list(path: Path) -> Importance:
    data, at, found = read_bounded(path, MAX_BYTES), 4, Importance()
    try:
        (entries,) = struct.unpack_from("<i", data, 0)
        for _ in range(entries):
            (length,) = struct.unpack_from("<i", data, at)
            name, at = data[at + 4 : at + 4 + length].decode(), at + 4 + length
            calls, numbers = struct.unpack_from("<ii", data, at)
            sums, at = np.frombuffer(data, "<f4", numbers, at + 8), at + 8 + 4 * numbers
            if not (0 < length <= MAX_NAME and numbers > 0):
                raise ValueError("a length is not above 0")
            found[name] = (sums / np.float32(max(calls, 1)))[None]
    except (struct.error, ValueError) as error:
        raise ModelError(f"{path}: is neither GGUF nor an older file of llama-imatrix: {error}") from None
    if not found:
        raise ModelError(f"{path}: holds no matrix; it is no file of llama-imatrix")
    return found


def importance_of(found: Importance, name: str, at: int, matrices: int, columns: int, where: str) -> Any:
    """Importance f32 [columns] of matrix `at` of the `matrices` in tensor `name`; None where the file has none of it.

    `ModelError` naming the file (`where`) where it is of another model.
    """
    held = found.get(name)
    if held is None:
        return None
    if held.size not in (columns, matrices * columns):
        told = f"has {held.size} numbers, not {matrices} x {columns}: it is of another model"
        raise ModelError(f"{where}: {name}: {told}")
    rows = held.reshape(-1, columns)
    return rows[at if len(rows) > 1 else 0]
