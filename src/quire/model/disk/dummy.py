"""Made-up weights in a config's shapes, for benchmarks of models that are not on disk (`--load-format dummy`)."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from quire.core.dtypes import BF16
from quire.model.disk.checkpoint import TensorInfo
from quire.model.disk.claim import disk_shape, slots
from quire.model.families.row import Family
from quire.model.spec import ModelSpec
from quire.ops.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

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
        for name, role, _, base in slots(spec, family):
            if (role.optional and name not in required) or (name == "head" and spec.tied_head):
                continue
            shape = disk_shape(role, spec, family)
            self.infos[f"{base}.weight"] = TensorInfo(BF16, shape, "dummy")
            if role.kind == "vector":
                self.vectors.add(f"{base}.weight")
            if f"{name}.bias" in required:
                self.infos[f"{base}.bias"] = TensorInfo(BF16, role.shape(spec)[:1], "dummy")

    @cached_property
    def _pool(self) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed)
        return (torch.randn(POOL, generator=generator) * STD).bfloat16().repeat(2)

    def tensor(self, name: str) -> Tensor:
        """The tensor `name`, bf16."""
        info = self.infos[name]
        if name in self.vectors:
            return torch.ones(info.shape, dtype=torch.bfloat16)
        start = zlib.crc32(name.encode()) % POOL
        return self._pool[start : start + POOL].repeat(-(-info.numbers // POOL))[: info.numbers].view(info.shape)

    def read_ahead(self, names: Iterable[str]) -> None:
        """Nothing: these numbers are on no disk."""

    def give_back(self) -> None:
        """Nothing: they are in memory of their own."""
