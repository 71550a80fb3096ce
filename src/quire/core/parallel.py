"""How a model is split over processes, and how many engines there are of it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from quire.core.errors import ConfigError
from quire.core.option import about
from quire.core.speculation import LOOK_UPS, Speculation

MOST_RANKS = 64
ALONE = (*LOOK_UPS, "draft_model")
"""Ways to draft that need nothing of the model's own parts."""


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks: processes that each have a share of the model."""

    tensor_parallel_size: Annotated[
        int, about("Processes that share each layer's matrices, every one with its part of the threads.")
    ] = 1
    data_parallel_size: Annotated[
        int, about("Engines of the whole model behind one server, every one with its part of threads and memory.")
    ] = 1

    @property
    def ranks(self) -> int:
        """Processes of one engine."""
        return self.tensor_parallel_size

    @property
    def processes(self) -> int:
        """Of all engines."""
        return self.ranks * self.data_parallel_size

    def validate(self, drafts: Speculation | None) -> None:
        """Refuse what cannot work, naming the option; `drafts`: how tokens are guessed ahead."""
        for name in ("tensor_parallel_size", "data_parallel_size"):
            if not 1 <= getattr(self, name) <= MOST_RANKS:
                raise ConfigError(f"--{name.replace('_', '-')} must lie in [1, {MOST_RANKS}]", param=name)
        if self.tensor_parallel_size > 1 and drafts is not None and drafts.method not in ALONE:
            raise ConfigError(
                f"--tensor-parallel-size: drafts of the method {drafts.method!r} read what is split over ranks; "
                f"use {', '.join(ALONE)}",
                param="tensor_parallel_size",
            )
