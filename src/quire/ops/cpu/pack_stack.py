"""Matrices of one shape packed below each other, one at a time, into slices of one buffer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from quire.core.dtypes import I8
from quire.core.errors import ConfigError
from quire.ops.arrays import Host
from quire.ops.cpu.matrix import SHARED, Numbers, assemble, take_apart
from quire.ops.cpu.pack import pack_dense
from quire.ops.cpu.pack_sparse import without_zeros
from quire.ops.cpu.state import Cpu
from quire.ops.native import huge_bytes
from quire.ops.weights import Packed, StoredMatrix, Weight


def pack_stack(cpu: Cpu, weights: Iterable[Weight | StoredMatrix], count: int) -> Packed:
    """`count` matrices [n, k] as one packed matrix [count * n, k]; n must be a multiple of the 16 rows of a block.

    Only one of them is in memory beside the result. Zeros are there for all when one has some. `ConfigError` when they
    are not in one format.
    """
    stack = _Stack(cpu, count)
    for weight in weights:
        stack.add(weight)
    return stack.packed()


class _Stack:
    def __init__(self, cpu: Cpu, count: int) -> None:
        self._cpu, self._count, self._filled = cpu, count, 0
        self._format: tuple[str, tuple[int, int], int, Numbers] | None = None
        self._own: dict[str, Host] = {}
        self._shared: dict[str, Host] = {}

    def add(self, weight: Weight | StoredMatrix) -> None:
        """Pack `weight` behind those before."""
        if isinstance(weight, Weight) and "zeros" in self._own and weight.zeros is None:
            weight = _with_zeros(weight)
        packed = pack_dense(self._cpu, weight)
        numbers, parts = take_apart(packed)
        if self._format is None:
            self._format = packed.kind, weight.shape, packed.group, numbers
            self._shared = {name: part for name, part in parts.items() if name in SHARED}
        elif isinstance(weight, Weight) and "zeros" in parts and "zeros" not in self._own:
            blank = take_apart(pack_dense(self._cpu, _with_zeros(weight)))[1]["zeros"]
            for place in range(self._filled):
                self._slice("zeros", len(blank), place)[:] = blank
        own = {name: part for name, part in parts.items() if name not in SHARED}
        self._check(packed, weight, numbers, {name: part for name, part in parts.items() if name in SHARED})
        for name, part in own.items():
            self._slice(name, len(part), self._filled)[:] = part
        self._filled += 1

    def packed(self) -> Packed:
        """All matrices that were packed."""
        assert self._format is not None and self._filled == self._count
        kind, (n, k), group, numbers = self._format
        whole = assemble(kind, (self._count * n, k), group, numbers, self._own | self._shared)
        return without_zeros(self._cpu, whole)

    def _slice(self, name: str, size: int, place: int) -> Host:
        if name not in self._own:
            self._own[name] = huge_bytes(self._count * size)
        return self._own[name][place * size : (place + 1) * size]

    def _check(self, packed: Packed, weight: Weight | StoredMatrix, numbers: Numbers, shared: dict[str, Host]) -> None:
        same = self._shared.keys() == shared.keys() and all(np.array_equal(self._shared[s], shared[s]) for s in shared)
        if self._format != (packed.kind, weight.shape, packed.group, numbers) or not same:
            raise ConfigError(
                f"cannot stack a {packed.kind} matrix on one of kind {self._format[0] if self._format else ''}: the "
                "experts of a layer must be in one format and order of columns; use the unquantized checkpoint and "
                "--quantization"
            )


def _with_zeros(weight: Weight) -> Weight:
    """Copy of the weight with zeros that are 0."""
    assert weight.scales is not None
    return replace(weight, zeros=np.zeros_like(weight.scales, dtype=I8))
