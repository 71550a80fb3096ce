"""Matrices that are split by columns, cut into runs of their own: sums with equal bits over any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import TypeVar

from quire.core.errors import ConfigError
from quire.model.load.reader import Reader
from quire.model.load.roles import ROLES, Share
from quire.model.net.parts import Mlp, Product
from quire.model.net.runs import RunsMlp, RunsProduct

T = TypeVar("T")
RUNS = 8
"""Runs of each sum, a power of two: so many ranks are the most that give the same bits."""


def load_o(reader: Reader, role: str, index: int) -> Product:
    """The output matrix of attention, in runs of whole heads where the reader makes any."""
    if not reader.form.runs:
        return reader.linear((role,), index)
    spec = reader.opened.spec
    parts = _of_runs(reader, gcd(RUNS, ROLES[role].units(spec)), lambda run: run.linear((role,), index))
    return RunsProduct(parts, ROLES[role].shape(spec)[1] // (len(parts) * reader.share.world))


def in_runs(reader: Reader, make: Callable[[Reader], Mlp]) -> Mlp:
    """What `make` makes of this rank's share, in runs where the reader makes any."""
    return RunsMlp(_of_runs(reader, RUNS, make)) if reader.form.runs else make(reader)


def _of_runs(reader: Reader, runs: int, make: Callable[[Reader], T]) -> tuple[T, ...]:
    rank, world = reader.share.rank, reader.share.world
    if runs % world:
        raise ConfigError(
            f"--rank-invariant: a sum of {runs} runs cannot be shared by --tensor-parallel-size {world}; "
            f"use a power of two up to {runs}",
            param="rank_invariant",
        )
    each = runs // world
    shares = [Share(rank * each + i, runs, step=reader.share.step) for i in range(each)]
    return tuple(make(reader.of(share)) for share in shares)
