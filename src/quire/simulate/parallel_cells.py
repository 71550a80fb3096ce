"""A cluster in cells: several routers, each with its own replicas, which get requests in turns; a process for each.

Nothing passes between cells, so what each gives is the same whoever runs beside it, and it is put together in order.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice

import msgspec
from msgspec.structs import replace as with_

from quire.core.errors import QuireError
from quire.core.machine import cores
from quire.simulate.cluster import Cluster
from quire.simulate.measures import ClusterPoint, Measures, TenantFigures
from quire.simulate.requests import SimulatedRequest
from quire.simulate.timeline import Design

SUMMED = ("steps", "rows", "busy", "replica_seconds", "deaths", "moved", "preemptions", "queries", "hits",
          "read_blocks")  # fmt: skip
"""Numbers of parts that add up."""


class CellResult(msgspec.Struct, kw_only=True):
    """What one cell gave, in a form that passes between processes."""

    tenants: dict[str, TenantFigures]
    curve: list[ClusterPoint]
    last: float
    steps: int
    rows: int
    busy: float
    replica_seconds: float
    deaths: int
    moved: int
    preemptions: int
    queries: int
    hits: int
    read_blocks: int

    def measures(self, targets: Mapping[str, float]) -> Measures:
        """Measures as of one that has seen it all."""
        found = Measures(targets)
        found.merge(self.tenants)
        found.curve = self.curve
        found.steps, found.rows, found.busy = self.steps, self.rows, self.busy
        return found


def run_cells(
    design: Design,
    load: Iterable[SimulatedRequest],
    targets: Mapping[str, float],
    cells: int,
    on_done: Callable[[], None],
) -> CellResult:
    """Run a load over so many cells; as many at one time as there are cores."""
    if cells == 1:
        return _run(design, load, targets, on_done)
    designs = [_cell(design, cells, at) for at in range(cells)]
    parts: list[CellResult] = []
    for first in range(0, cells, most := max(1, cores().logical)):
        under_way = [
            _forked(designs[at], islice(load, at, None, cells), targets)
            for at in range(first, min(cells, first + most))
        ]
        parts += [_joined(process, pipe) for process, pipe in under_way]
    return _together(parts)


def _cell(design: Design, cells: int, at: int) -> Design:
    count = design.replicas // cells + (at < design.replicas % cells)
    return replace(design, replicas=count, seed=design.seed * cells + at)


def _run(
    design: Design,
    load: Iterable[SimulatedRequest],
    targets: Mapping[str, float],
    on_done: Callable[[], None] = lambda: None,
) -> CellResult:
    cluster = Cluster(design, targets)
    measures = cluster.run(load, on_done)
    queries, hits = (sum(each) for each in zip(*(replica.lookups for replica in cluster.replicas), strict=True))
    return CellResult(
        tenants=measures.figures(), curve=measures.curve, last=cluster.last, steps=measures.steps, rows=measures.rows,
        busy=measures.busy, replica_seconds=cluster.fleet.replica_seconds, deaths=cluster.deaths, moved=cluster.moved,
        preemptions=sum(replica.preemptions for replica in cluster.replicas), queries=queries, hits=hits,
        read_blocks=0 if cluster.store is None else cluster.store.read_blocks,
    )  # fmt: skip


def _forked(design: Design, load: Iterator[SimulatedRequest], targets: Mapping[str, float]) -> tuple[int, int]:
    """Process and pipe of a cell that runs in a process of its own."""
    sys.stdout.flush()
    pipe, end = os.pipe()
    process = os.fork()
    if process:
        os.close(end)
        return process, pipe
    code = 1
    try:
        os.close(pipe)
        with os.fdopen(end, "wb") as out:
            out.write(msgspec.msgpack.encode(_run(design, load, targets)))
        code = 0
    except KeyboardInterrupt:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _joined(process: int, pipe: int) -> CellResult:
    with os.fdopen(pipe, "rb") as found:
        told = found.read()
    _, status = os.waitpid(process, 0)
    if status:
        raise QuireError(f"a process that simulates a cell ended with status {status}; was there memory enough?")
    return msgspec.msgpack.decode(told, type=CellResult)


def _together(parts: list[CellResult]) -> CellResult:
    """Sums, and the curves of those that still run added up."""
    whole = parts[0]
    for part in parts[1:]:
        measures = whole.measures({})
        measures.merge(part.tenants)
        sums = {name: getattr(whole, name) + getattr(part, name) for name in SUMMED}
        curve = _added(whole.curve, part.curve)
        whole = with_(whole, tenants=measures.figures(), curve=curve, last=max(whole.last, part.last), **sums)
    return whole


def _added(one: list[ClusterPoint], other: list[ClusterPoint]) -> list[ClusterPoint]:
    """Points of the same times; those that only one has are of a cell that runs longer."""
    known, found = {point.time: point for point in other}, []
    for point in one:
        beside = known.pop(point.time, None)
        if beside is not None:
            count = point.replicas + beside.replicas
            kv = (point.kv * point.replicas + beside.kv * beside.replicas) / max(1, count)
            point = ClusterPoint(point.time, count, point.running + beside.running, point.waiting + beside.waiting, kv)
        found.append(point)
    return sorted([*found, *known.values()])
