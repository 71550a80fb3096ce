"""How a model is split over processes, and how many engines there are of it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from quire.core.errors import ConfigError
from quire.core.option import about
from quire.core.speculation import LOOK_UPS, Speculation

MOST_RANKS = 64
SPLIT = 512
"""Keys of a split of attention, which one rank has whole: `kSplit` of csrc/units/attention_call.h."""
ALONE = (*LOOK_UPS, "draft_model")
"""Ways to draft that need nothing of the model's own parts."""


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks: processes that each have a share of the model."""

    tensor_parallel_size: Annotated[
        int, about("Processes that share each layer's matrices, every one with its part of the threads.")
    ] = 1
    context_parallel_size: Annotated[
        int, about("Processes that share the keys and values of each sequence, 512 tokens in turn, and long prompts.")
    ] = 1
    enable_expert_parallel: Annotated[
        bool, about("Give each rank of --tensor-parallel-size whole experts instead of a part of each one's width.")
    ] = False
    expert_parallel_size: Annotated[
        int, about("Processes that have all of the model but its experts, which are divided among them.")
    ] = 1
    num_redundant_experts: Annotated[
        int, about("Further copies of each layer's most used experts, so that ranks have as much to do.")
    ] = 0
    expert_load_file: Annotated[
        str, about("JSON file that keeps how often experts are used; at the start it says who holds which.")
    ] = ""
    data_parallel_size: Annotated[
        int, about("Engines of the whole model behind one server, every one with its part of threads and memory.")
    ] = 1

    @property
    def ranks(self) -> int:
        """Processes of one engine."""
        return self.context_parallel_size * self.expert_parallel_size * self.tensor_parallel_size

    @property
    def expert_axis(self) -> str:
        """The axis of ranks over which experts are divided; "" where none is."""
        return "expert" if self.expert_parallel_size > 1 else "tensor" if self.enable_expert_parallel else ""

    @property
    def ranks_option(self) -> str:
        """The option that asks for ranks, to name in errors."""
        asked = (name for name in ("expert_parallel_size", "context_parallel_size") if getattr(self, name) > 1)
        return next(asked, "tensor_parallel_size")

    @property
    def processes(self) -> int:
        """That share this machine."""
        return self.ranks * self.data_parallel_size

    def validate(self, drafts: Speculation | None) -> None:
        """Refuse what cannot work, naming the option; `drafts`: how tokens are guessed ahead."""
        for name in ("tensor_parallel_size", "expert_parallel_size", "context_parallel_size", "data_parallel_size"):
            if not 1 <= getattr(self, name) <= MOST_RANKS:
                raise ConfigError(f"{_flag(name)} must lie in [1, {MOST_RANKS}]", param=name)
        if self.context_parallel_size > 1 and drafts is not None and (drafts.method not in LOOK_UPS or drafts.tree):
            raise ConfigError(
                "--context-parallel-size: a model that drafts keeps all keys on one rank, and drafts that branch move "
                f"them between ranks; use {', '.join(LOOK_UPS)} without branches",
                param="context_parallel_size",
            )
        if self.ranks > 1 and drafts is not None and drafts.method not in ALONE:
            raise ConfigError(
                f"{_flag(self.ranks_option)}: drafts of the method {drafts.method!r} read what is split over ranks; "
                f"use {', '.join(ALONE)}",
                param=self.ranks_option,
            )
        self._validate_experts()

    def _validate_experts(self) -> None:
        if self.ranks > MOST_RANKS:
            raise ConfigError(
                f"--expert-parallel-size {self.expert_parallel_size} times --tensor-parallel-size "
                f"{self.tensor_parallel_size} times --context-parallel-size {self.context_parallel_size} are more than "
                f"{MOST_RANKS} ranks",
                param=self.ranks_option,
            )
        if self.enable_expert_parallel and self.expert_parallel_size > 1:
            raise ConfigError(
                "--enable-expert-parallel gives experts to the ranks of --tensor-parallel-size, --expert-parallel-size "
                "to ranks of their own; use one of them",
                param="enable_expert_parallel",
            )
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ConfigError(
                "--enable-expert-parallel: there is one rank to give experts to; set --tensor-parallel-size, or use "
                "--expert-parallel-size",
                param="enable_expert_parallel",
            )
        if self.num_redundant_experts < 0:
            raise ConfigError("--num-redundant-experts must be at least 0", param="num_redundant_experts")
        for name in ("num_redundant_experts", "expert_load_file"):
            if getattr(self, name) and not self.expert_axis:
                raise ConfigError(
                    f"{_flag(name)}: every rank has all experts; use --expert-parallel-size or "
                    "--enable-expert-parallel",
                    param=name,
                )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
