"""Work on a large matrix in pieces of rows, on all cores."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from quire.core.config import cpu_count
from quire.ops.lazy import torch

CHUNK = 1 << 17  # numbers per piece: temporaries stay in the cache


def over_rows(n: int, k: int, work: Callable[[slice], None]) -> None:
    """Call `work(rows)` for slices that cover n rows of k numbers; pieces must not depend on one another.

    Each thread takes torch operations of one thread: two threads of torch's own took 2 to 50 times the processor time
    of one whenever another process was busy, because they spin at the end of every small operation.
    """
    step = max(1, CHUNK // k)
    pieces = [slice(at, min(n, at + step)) for at in range(0, n, step)]
    with ThreadPoolExecutor(cpu_count(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(work, pieces))
