"""How much of a model stays in memory, decided while it is loaded: sizes are known when a layer is packed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.machine import available_memory, cache_folder

SHARE = 0.75
"""Of the free memory that weights take where nothing is said; keys and values get half of what is left then."""


def allowed(config: EngineConfig) -> int:
    """Bytes of weights that each process may have in memory beside `--weight-offload`."""
    given = int(config.offload.weight_memory_gib * 2**30) or int(available_memory() * SHARE)
    return given // config.processes


def folder(config: EngineConfig) -> Path:
    """Folder of the file that weights are read from."""
    given = config.offload.weight_offload_folder
    return Path(given) if given else cache_folder() / "offload"


@dataclass(frozen=True)
class Budget:
    """`most` bytes of weights in memory. `layers` of each layer and `outer` of all else, as they lie on disk."""

    most: int
    layers: tuple[int, ...]
    outer: int


@dataclass
class OffloadAccount:
    """What was loaded so far: bytes that may leave, by layer, those of them that stay, and what has to stay."""

    budget: Budget
    sizes: list[int] = field(default_factory=list)
    held: int = 0
    fixed: int = 0

    def stays(self, size: int, fixed: int, slots: int) -> bool:
        """Whether the next layer is to stay, `size` bytes that may leave and `fixed` that may not.

        What memory lacks, `slots` of the largest included, is taken from all of the model alike.
        """
        self.sizes.append(size)
        self.fixed += fixed
        made, budget = sum(self.sizes), self.budget
        whole = (made + self.fixed) / max(1, sum(budget.layers[: len(self.sizes)])) * sum(budget.layers)
        room = budget.most - budget.outer
        if whole > room:
            rest = whole * self.fixed / max(1, made + self.fixed)
            room = int((room - rest - slots * max(self.sizes)) * made / max(1, whole - rest))
        stays = self.held + size <= room
        self.held += size if stays else 0
        return stays

    def too_small(self, needed: int, what: str) -> ConfigError:
        """Explain that `needed` bytes are the least, and why."""
        return ConfigError(
            f"--weight-memory-gib: {what} take {needed:,} bytes, {self.budget.most:,} are allowed; give at least "
            f"{needed / 2**30 + 0.0005:.3f}",
            param="weight_memory_gib",
        )
