"""Which rank has which part of a model: one number for each axis along which a model is split.

Ranks of one layer's matrices are next to each other, as they exchange most, then those of its experts, then the parts
of a sequence, then stages (Narayanan et al. 2021).
"""

from __future__ import annotations

import msgspec

from quire.core.parallel import ParallelConfig

AXES = ("pipeline", "context", "expert", "tensor")
"""From the one whose neighbours are furthest apart to the one whose neighbours are next to each other."""


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """How often a model is split along each axis: stages of layers, parts of sequences, experts, shares of matrices."""

    pipeline: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1

    @property
    def world(self) -> int:
        """All ranks."""
        return self.pipeline * self.context * self.expert * self.tensor

    def along(self, rank: int, axis: str) -> int:
        """The place of `rank` along `axis`."""
        return rank // self._stride(axis) % int(getattr(self, axis))

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axis` alone, in order, itself included."""
        stride = self._stride(axis)
        first = rank - self.along(rank, axis) * stride
        return tuple(first + i * stride for i in range(getattr(self, axis)))

    def _stride(self, axis: str) -> int:
        stride = 1
        for each in AXES[AXES.index(axis) + 1 :]:
            stride *= getattr(self, each)
        return stride


ONE_RANK = Topology()


def topology_of(parallel: ParallelConfig) -> Topology:
    """The ranks of one engine."""
    return Topology(
        context=parallel.context_parallel_size,
        pipeline=parallel.pipeline_parallel_size,
        expert=parallel.expert_parallel_size,
        tensor=parallel.tensor_parallel_size,
    )
