"""How a model is split over processes, and how many engines there are of it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from quire.core.errors import ConfigError
from quire.core.option import about
from quire.core.speculation import Speculation

MOST_RANKS = 64


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks: processes that each have a share of the model."""

    tensor_parallel_size: Annotated[
        int, about("Processes that share each layer's matrices, every one with its part of the threads.")
    ] = 1
    enable_sequence_parallel: Annotated[
        bool, about("Between the matrices that ranks share, each has a part of a long step's rows: fewer are normed.")
    ] = False
    rank_invariant: Annotated[
        bool, about("The same bits whatever the number of ranks, 1 included: sums are made in runs, which takes time.")
    ] = False
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
        return self.expert_parallel_size * self.tensor_parallel_size

    @property
    def expert_axis(self) -> str:
        """The axis of ranks over which experts are divided; "" where none is."""
        return "expert" if self.expert_parallel_size > 1 else "tensor" if self.enable_expert_parallel else ""

    @property
    def ranks_option(self) -> str:
        """The option that asks for ranks, to name in errors."""
        return "expert_parallel_size" if self.expert_parallel_size > 1 else "tensor_parallel_size"

    @property
    def processes(self) -> int:
        """That share this machine."""
        return self.ranks * self.data_parallel_size

    def validate(self, drafts: Speculation | None) -> None:
        """Refuse what cannot work, naming the option; `drafts`: how tokens are guessed ahead."""
        for name in ("tensor_parallel_size", "expert_parallel_size", "data_parallel_size"):
            if not 1 <= getattr(self, name) <= MOST_RANKS:
                raise ConfigError(f"{_flag(name)} must lie in [1, {MOST_RANKS}]", param=name)
        if drafts is not None:
            self._check_drafts(drafts)
            stops = drafts.method == "eagle3" or drafts.layers > 0
            if self.enable_sequence_parallel and stops:
                raise ConfigError(
                    f"--enable-sequence-parallel: drafts of the method {drafts.method!r} stop between layers, where no "
                    "rank has all rows; leave one of them out",
                    param="enable_sequence_parallel",
                )
        if self.enable_sequence_parallel and self.tensor_parallel_size == 1:
            raise ConfigError(
                "--enable-sequence-parallel: one rank has all rows; it needs --tensor-parallel-size",
                param="enable_sequence_parallel",
            )
        self._validate_experts()

    def _check_drafts(self, drafts: Speculation) -> None:
        """Over how many ranks a draft model may be split."""
        size = drafts.draft_tensor_parallel_size
        sizes: tuple[int, ...] = (0, 1)
        if drafts.method == "draft_model":
            sizes = (0, 1, self.tensor_parallel_size)
        elif drafts.method == "self":
            sizes = (0, self.tensor_parallel_size)
        if size not in sizes:
            why = {"draft_model": "a draft model is computed by one rank or by all", "self": "the target is split so"}
            raise ConfigError(
                f"--speculative-draft-tensor-parallel-size {size}: with {drafts.method!r} it may be "
                f"{' or '.join(map(str, sorted({*sizes} - {0})))}: "
                f"{why.get(drafts.method, 'nothing of these drafts is split')}",
                param="speculative_draft_tensor_parallel_size",
            )

    def _validate_experts(self) -> None:
        if self.ranks > MOST_RANKS:
            raise ConfigError(
                f"--expert-parallel-size {self.expert_parallel_size} times --tensor-parallel-size "
                f"{self.tensor_parallel_size} are more than {MOST_RANKS} ranks",
                param="expert_parallel_size",
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
        if self.enable_expert_parallel and self.enable_sequence_parallel:
            raise ConfigError(
                "--enable-sequence-parallel: of experts that ranks hold whole, every rank gets all rows; leave one out",
                param="enable_sequence_parallel",
            )
        if self.expert_axis and self.rank_invariant:
            raise ConfigError(
                "--rank-invariant: experts that ranks hold whole are not summed in runs; leave one of them out",
                param="rank_invariant",
            )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
