"""Work of torch on a large matrix in pieces of rows, on all cores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from quire.ops.lazy import torch
from quire.quant import parallel_rows


def over_rows(n: int, k: int, work: Callable[[slice], None]) -> None:
    """As of `quire.quant.parallel_rows`; each thread takes torch operations of one thread.

    Two threads of torch's own took 2 to 50 times the processor time of one whenever another process was busy, because
    they spin at the end of every small operation.
    """
    parallel_rows.over_rows(n, k, work, partial(torch.set_num_threads, 1))
