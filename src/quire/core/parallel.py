"""How a model is split over processes, and how many engines there are of it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from quire.core.errors import ConfigError
from quire.core.option import about
from quire.core.speculation import LOOK_UPS, Speculation

MOST_RANKS = 64
MOST_STEPS = 64
ALONE = (*LOOK_UPS, "draft_model")
"""Ways to draft that need nothing of the model's own parts."""


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks: processes that each have a share of the model."""

    tensor_parallel_size: Annotated[
        int, about("Processes that share each layer's matrices, every one with its part of the threads.")
    ] = 1
    pipeline_parallel_size: Annotated[
        int, about("Stages, each with some of the layers, that compute different steps at the same time.")
    ] = 1
    pipeline_layers: Annotated[
        str, about("Layers of each stage, as in 9,7; auto = such that stages take about the same time.")
    ] = "auto"
    pipeline_micro_batches: Annotated[
        int, about("Steps under way at one time in a pipeline; 0 = two for each stage.")
    ] = 0
    data_parallel_size: Annotated[
        int, about("Engines of the whole model behind one server, every one with its part of threads and memory.")
    ] = 1

    @property
    def ranks(self) -> int:
        """Processes of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def steps_under_way(self) -> int:
        """At one time at most."""
        stages = self.pipeline_parallel_size
        return 1 if stages == 1 else self.pipeline_micro_batches or 2 * stages

    @property
    def wholes(self) -> int:
        """How many processes of this machine share what all layers take: a stage has but its own part of that."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def pinned_layers(self) -> tuple[int, ...]:
        """Layers of each stage as they were asked for; none: they were not."""
        return () if self.pipeline_layers == "auto" else tuple(int(part) for part in self.pipeline_layers.split(","))

    @property
    def processes(self) -> int:
        """That share this machine."""
        return self.ranks * self.data_parallel_size

    def validate(self, drafts: Speculation | None) -> None:
        """Refuse what cannot work, naming the option; `drafts`: how tokens are guessed ahead."""
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        for name in sizes:
            if not 1 <= getattr(self, name) <= MOST_RANKS:
                raise ConfigError(f"--{name.replace('_', '-')} must lie in [1, {MOST_RANKS}]", param=name)
        if self.ranks > MOST_RANKS:
            raise ConfigError(f"{self.ranks} ranks: an engine has {MOST_RANKS} at most", param=sizes[0])
        self._check_stages()
        if self.ranks > 1 and drafts is not None and drafts.method not in ALONE:
            name = next(name for name in sizes if getattr(self, name) > 1)
            raise ConfigError(
                f"--{name.replace('_', '-')}: drafts of the method {drafts.method!r} read what is split over ranks; "
                f"use {', '.join(ALONE)}",
                param=name,
            )

    def _check_stages(self) -> None:
        stages, asked = self.pipeline_parallel_size, self.pipeline_micro_batches
        if asked and not (stages > 1 and 1 <= asked <= MOST_STEPS):
            raise ConfigError(
                f"--pipeline-micro-batches {asked}: of --pipeline-parallel-size 2 or more, 1 to {MOST_STEPS}",
                param="pipeline_micro_batches",
            )
        parts = self.pipeline_layers.split(",")
        if self.pipeline_layers != "auto" and not (
            len(parts) == stages > 1 and all(part.isascii() and part.isdecimal() and int(part) for part in parts)
        ):
            raise ConfigError(
                f"--pipeline-layers {self.pipeline_layers}: needs a number of layers for each of the {stages} stages "
                "of --pipeline-parallel-size, as in 9,7",
                param="pipeline_layers",
            )
