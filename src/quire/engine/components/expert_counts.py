"""How often experts were chosen, where they are divided over ranks: seen, and kept for the next start."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from quire.core.parallel import ParallelConfig
from quire.model.batch import Forward
from quire.model.load.parallel_decoder import counted_pairs
from quire.ops.arrays import Host
from quire.parallel.experts import ExpertPlan, write_counts

log = logging.getLogger(__name__)
EVERY_S = 10.0
"""Seconds between two writings of the counts while the engine is idle."""


class ExpertCounts:
    """The counts of a decoder whose experts are divided; those before now are forgotten."""

    def __init__(self, counted: Host, parallel: ParallelConfig, plan: ExpertPlan) -> None:
        self._counted, self._before = counted, plan.counts
        self._path = Path(parallel.expert_load_file).expanduser() if parallel.expert_load_file else None
        self._ranks = parallel.tensor_parallel_size if plan.axis == "tensor" else parallel.expert_parallel_size
        self._written, self._kept = 0.0, 0
        counted[:] = 0

    def shown(self) -> dict[str, Any]:
        """`expert_pairs` and `expert_imbalance` of `Stats`."""
        *ranks, most = self._counted[:, -self._ranks - 1 :].sum(0).tolist()
        imbalance = most * self._ranks / sum(ranks) if most else 1.0
        return {"expert_pairs": tuple(ranks), "expert_imbalance": imbalance}

    def counts(self) -> tuple[tuple[int, ...], ...]:
        """Counts by layer and expert; what was known at the start weighs half."""
        rows = self._counted[:, : -self._ranks - 1].tolist()
        before = self._before if [*map(len, self._before)] == [*map(len, rows)] else ((0,) * len(rows[0]),) * len(rows)
        return tuple(
            tuple(now + then // 2 for now, then in zip(row, old, strict=True))
            for row, old in zip(rows, before, strict=True)
        )

    def keep(self, now: bool = False) -> None:
        """Write them where `--expert-load-file` says, if they grew, and the last time was a while ago, or `now`."""
        if self._path is None or not (now or time.monotonic() - self._written > EVERY_S):
            return
        total = int(self._counted.sum())
        if total == self._kept:
            return
        self._written, self._kept = time.monotonic(), total
        try:
            write_counts(self._path, self.counts())
        except OSError as error:
            log.warning("--expert-load-file %s cannot be written: %s", self._path, error)


def expert_counts(decoder: Forward, parallel: ParallelConfig, plan: ExpertPlan) -> ExpertCounts | None:
    """Expert counts of `decoder` from now on, or None where every rank has all experts."""
    counted = counted_pairs(decoder)
    return None if counted is None else ExpertCounts(counted, parallel, plan)
