"""Files as memory: pages appear when they are touched, may be asked for before, and are given back after."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from quire.core.dtypes import Dtype
from quire.ops.arrays import Host

STEP = 256 << 10
"""Bytes asked for at a time: of a larger piece Linux reads only the beginning."""


def view(data: mmap.mmap, dtype: Dtype, shape: tuple[int, ...], start: int) -> Host:
    """The numbers from byte `start` on, where they lie."""
    count = math.prod(shape)
    if not count:
        return np.empty(shape, dtype)
    return np.frombuffer(data, dtype, count, start).reshape(shape)


def read_ahead(path: Path, spans: Iterable[tuple[int, int]]) -> None:
    """Let the system read bytes `start` to `stop` of each span into its cache; takes no memory of ours."""
    if not hasattr(os, "posix_fadvise"):  # macOS
        return
    with path.open("rb") as file:
        for start, stop in _joined(spans):
            for at in range(start, stop, STEP):
                os.posix_fadvise(file.fileno(), at, min(STEP, stop - at), os.POSIX_FADV_WILLNEED)


def give_back(data: mmap.mmap) -> None:
    """Drop the mapped pages, which stay in the system's cache. Nothing may have been written to them."""
    if hasattr(mmap, "MADV_DONTNEED"):
        data.madvise(mmap.MADV_DONTNEED)


def _joined(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The spans in the file's order, neighbours as one."""
    begin = end = 0
    for start, stop in sorted(spans):
        if start > end:
            yield begin, end
            begin = start
        end = max(end, stop)
    yield begin, end
