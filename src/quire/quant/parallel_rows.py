"""Work on a large matrix in pieces of rows, on all cores."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from quire.core.config import cpu_count
from quire.core.dtypes import Dtype
from quire.ops.arrays import Host

CHUNK = 1 << 17  # numbers per piece: temporaries stay in the cache


def over_rows(n: int, k: int, work: Callable[[slice], None], begin: Callable[[], object] | None = None) -> None:
    """Call `work(rows)` for slices that cover n rows of k numbers; pieces must not depend on one another.

    Numbers may become inf or nan without a warning of numpy's. `begin`: what each thread calls before its first piece.
    """

    def quietly(rows: slice) -> None:
        with np.errstate(all="ignore"):
            work(rows)

    step = max(1, CHUNK // k)
    pieces = [slice(at, min(n, at + step)) for at in range(0, n, step)]
    with ThreadPoolExecutor(cpu_count(), initializer=begin) as pool:
        list(pool.map(quietly, pieces))


def inverse(scales: Host) -> Host:
    """1 / scales, 0 where they are not above 0."""
    made: Host = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    return made


def in_dtype(w: Host, dtype: Dtype) -> Host:
    """The matrix w [n, k] in `dtype`, rounded to nearest; itself where it is."""
    if w.dtype == dtype:
        return w
    out = np.empty(w.shape, dtype)

    def work(rows: slice) -> None:
        out[rows] = w[rows]

    n, k = w.shape
    over_rows(n, k, work)
    return out
