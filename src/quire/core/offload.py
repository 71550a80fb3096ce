"""Weights that are not all in the memory where they are multiplied."""

from __future__ import annotations

from typing import Annotated

import msgspec

from quire.core.errors import ConfigError
from quire.core.option import about, one_of

WEIGHT_OFFLOADS = ("none", "disk", "experts")


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
        float, about("GiB of weights in memory beside --weight-offload at most; 0 = three quarters of what is free.")
    ] = 0.0
    weight_offload_folder: Annotated[
        str | None, about("Folder of the file of --weight-offload; among the user's caches if not given.")
    ] = None
    cpu_offload_gb: Annotated[
        float, about("GiB of a GPU's weights that stay in the host's memory and are copied ahead of their layers.")
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

    def validate(self, replicas: int, ranks: int) -> None:
        """Refuse what cannot work, naming the option; `replicas` of an engine, `ranks` of each."""
        one_of("weight_offload", self.weight_offload, WEIGHT_OFFLOADS)
        for name in ("weight_memory_gib", "cpu_offload_gb"):
            if not 0 <= getattr(self, name) <= 1 << 20:
                raise ConfigError(f"--{name.replace('_', '-')} must lie in [0, 1048576]", param=name)
        if not self.from_file and (self.weight_memory_gib or self.weight_offload_folder):
            name = "weight_memory_gib" if self.weight_memory_gib else "weight_offload_folder"
            raise ConfigError(f"--{name.replace('_', '-')} needs --weight-offload", param=name)
        if self.fully_shard:
            self._check_sharding(replicas, ranks)

    def _check_sharding(self, replicas: int, ranks: int) -> None:
        why = ""
        if replicas < 2:
            why = "there is one replica, which needs all weights; give --data-parallel-size, or leave it out"
        elif ranks > 1:
            why = "ranks of one engine (--tensor-parallel-size and others) have shares of the weights already"
        elif self.from_file or self.cpu_offload_gb:
            why = "weights that are elsewhere (--weight-offload, --cpu-offload-gb) cannot be shared in memory"
        if why:
            raise ConfigError(f"--fully-shard: {why}", param="fully_shard")
