"""Weights that are not all in the memory where they are multiplied, and where evicted blocks of the KV cache go."""

from __future__ import annotations

from typing import Annotated

import msgspec

from quire.core.errors import ConfigError
from quire.core.exclusions.features import (
    CPU_OFFLOAD,
    EXPERTS_ON_DISK,
    FULLY_SHARD,
    KV_OFFLOADING,
    KV_STORE,
    LAYERS_ON_DISK,
    NO_KV_STORE,
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


FLUSH_SECONDS = 10.0
"""That an engine's end may take to keep what is in no store yet."""


class TierConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Tiers behind the KV cache. A folder may be shared by engines of one host, of the same model or of several."""

    kv_store: Annotated[
        str | None,
        about(
            "Folder for keys, values and tokens of prompts that are evicted from the KV cache. It survives restarts."
        ),
    ] = None
    kv_store_gb: Annotated[
        float,
        about(
            "Largest size of that folder in GB. The least recently used blocks are deleted first.", gt=0, le=MOST_GIB
        ),
    ] = 16.0
    kv_offloading_size: Annotated[
        float | None, about("GiB of host memory for keys and values that a GPU's KV cache has no room for.")
    ] = None

    @property
    def any(self) -> bool:
        """Whether there is a tier at all."""
        return bool(self.kv_store) or bool(self.kv_offloading_size)

    @property
    def features(self) -> frozenset[Feature]:
        """What is asked for, as far as it excludes something."""
        return found(
            (KV_STORE, bool(self.kv_store)), (NO_KV_STORE, not self.kv_store),
            (KV_OFFLOADING, bool(self.kv_offloading_size)),
        )  # fmt: skip

    def validate(self) -> None:
        """Refuse values that cannot work, naming the option."""
        if not 0 <= (self.kv_offloading_size or 0.0) <= MOST_GIB:
            raise ConfigError(f"--kv-offloading-size must lie in [0, {MOST_GIB}]", param="kv_offloading_size")
