"""Made-up weights in a config's shapes, for benchmarks of models that are not on disk (`--load-format dummy`)."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import BF16, F32, F64
from quire.model.disk.checkpoint import TensorInfo
from quire.model.disk.claim import disk_shape, slots
from quire.model.families.row import Family
from quire.model.spec import ModelSpec
from quire.ops.arrays import Host

POOL = 1_000_003  # a prime, so that rows of a matrix start at different places of the pool
STD = 0.02


class DummyWeights:
    """A `Source` of normal numbers * 0.02 (norm weights 1), the same on every run and machine for one seed.

    A pool of numbers is drawn once and repeated: drawing 1.2 G takes 6 s, repeating 1 s, and timing does not see it.
    """

    def __init__(self, spec: ModelSpec, family: Family, required: frozenset[str], seed: int = 0) -> None:
        self._seed = seed
        self.infos: dict[str, TensorInfo] = {}
        self.vectors: set[str] = set()
        for name, role, place, base in slots(spec, family):
            if (role.optional and name not in required) or (name == "head" and spec.tied_head):
                continue
            shape = disk_shape(role, spec.at(place.layer), family)
            self.infos[f"{base}.weight"] = TensorInfo(BF16, shape, "dummy")
            if role.kind == "vector":
                self.vectors.add(f"{base}.weight")
            if f"{name}.bias" in required and not family.may_lack(f"{name}.bias", place.layer, spec.layers):
                self.infos[f"{base}.bias"] = TensorInfo(BF16, role.shape(spec.at(place.layer))[:1], "dummy")

    @cached_property
    def _pool(self) -> Host:
        return np.tile((normal(self._seed, POOL) * STD).astype(BF16), 2)

    def tensor(self, name: str) -> Host:
        """The tensor `name`, bf16."""
        info = self.infos[name]
        if name in self.vectors:
            return np.ones(info.shape, BF16)
        start = zlib.crc32(name.encode()) % POOL
        return np.resize(self._pool[start : start + POOL], info.shape)

    def read_ahead(self, names: Iterable[str]) -> None:
        """Nothing: these numbers are on no disk."""

    def give_back(self) -> None:
        """Nothing: they are in memory of their own."""


def normal(seed: int, count: int) -> NDArray[np.float32]:
    """`count` standard normal numbers f32, at least 16, by Box and Muller (1958), in the order in which torch draws.

    Of two runs of eight uniform numbers the first gives radii and the second angles; what is left over at the end is
    drawn anew, as the last sixteen. The functions are those of float64, whose results do not depend on the processor.
    """
    blocks = count // 16
    drawn = np.random.RandomState(seed & 0xFFFFFFFF).randint(0, 1 << 32, count + 16, np.uint32)
    uniform = (drawn & 0xFFFFFF).astype(F32) * np.float32(2**-24)
    pairs = np.concatenate((uniform[: 16 * blocks], uniform[count:])).reshape(-1, 2, 8)
    radius = np.sqrt(np.float32(-2) * np.log((1 - pairs[:, 0]).astype(F64)).astype(F32))
    angle = (np.float32(2 * np.pi) * pairs[:, 1]).astype(F64)
    made = np.stack((radius * np.cos(angle).astype(F32), radius * np.sin(angle).astype(F32)), 1).reshape(-1)
    found = np.empty(count, F32)
    found[: 16 * blocks] = made[:-16]
    if count % 16:
        found[-16:] = made[-16:]
    return found
