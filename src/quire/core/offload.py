"""Weights that are not all in the memory where they are multiplied."""

from __future__ import annotations

from typing import Annotated

import msgspec

from quire.core.exclusions.features import (
    CPU_OFFLOAD,
    EXPERTS_ON_DISK,
    FULLY_SHARD,
    LAYERS_ON_DISK,
    NO_WEIGHT_OFFLOAD,
    WEIGHT_FOLDER,
    WEIGHT_MEMORY,
    Feature,
    found,
)
from quire.core.options.fields import about

WEIGHT_OFFLOADS = ("none", "disk", "experts")
MOST_GIB = 1 << 20


class OffloadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where weights that do not fit wait. Outputs stay what they are without, bit for bit."""

    weight_offload: Annotated[
        str,
        about(
            "Read weights from a file while steps run: disk = layers that do not fit in memory, experts = experts "
            "that were chosen and are not there.",
            WEIGHT_OFFLOADS,
        ),
    ] = "none"
    weight_memory_gib: Annotated[
        float,
        about(
            "GiB of weights in memory beside --weight-offload at most; 0 = three quarters of what is free.",
            ge=0,
            le=MOST_GIB,
        ),
    ] = 0.0
    weight_offload_folder: Annotated[
        str | None, about("Folder of the file of --weight-offload; among the user's caches if not given.")
    ] = None
    cpu_offload_gb: Annotated[
        float,
        about(
            "GiB of a GPU's weights that stay in the host's memory and are copied ahead of their layers.",
            ge=0,
            le=MOST_GIB,
        ),
    ] = 0.0

    fully_shard: Annotated[
        bool,
        about(
            "Replicas (--data-parallel-size) keep one copy of the layers together: 1/N for each of N. On several hosts "
            "(--nnodes) each has a share in memory, and the rest is gathered in every step."
        ),
    ] = False

    @property
    def moves(self) -> bool:
        """Whether packed weights do not stay where they were made."""
        return self.from_file or self.fully_shard

    @property
    def from_file(self) -> bool:
        """Whether weights are read from a file while steps run."""
        return self.weight_offload != "none"

    @property
    def features(self) -> frozenset[Feature]:
        """What is asked for, as far as it excludes something."""
        return found(
            (LAYERS_ON_DISK, self.weight_offload == "disk"), (EXPERTS_ON_DISK, self.weight_offload == "experts"),
            (NO_WEIGHT_OFFLOAD, not self.from_file), (WEIGHT_MEMORY, self.weight_memory_gib > 0),
            (WEIGHT_FOLDER, bool(self.weight_offload_folder)), (CPU_OFFLOAD, self.cpu_offload_gb > 0),
            (FULLY_SHARD, self.fully_shard),
        )  # fmt: skip
