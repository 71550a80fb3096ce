"""How a model is split over processes, and how many engines there are of it."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from quire.core.errors import ConfigError
from quire.core.exclusions.features import (
    CONTEXT,
    EXPERT_LOAD_FILE,
    EXPERT_RANKS,
    MICRO_BATCHES,
    ONE_REPLICA,
    ONE_STAGE,
    ONE_TENSOR_RANK,
    PREFILL_REPLICAS,
    RANK_INVARIANT,
    REDUNDANT_EXPERTS,
    REPLICAS,
    SEQUENCE_PARALLEL,
    STAGES,
    TENSOR,
    UNDIVIDED_EXPERTS,
    WHOLE_EXPERTS,
    Feature,
    found,
)
from quire.core.options.fields import about, flag
from quire.core.speculation import Speculation

MOST_RANKS = 64
SPLIT = 512
"""Keys of a split of attention, which one rank has whole: `kSplit` of csrc/units/attention_call.h."""
MOST_STEPS = 64
SIZES = ("pipeline_parallel_size", "expert_parallel_size", "context_parallel_size", "tensor_parallel_size")
"""Axes of the ranks of one engine."""


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks: processes that each have a share of the model."""

    tensor_parallel_size: Annotated[
        int,
        about(
            "Tensor parallelism: number of ranks that divide each layer's matrices and the threads.",
            ge=1,
            le=MOST_RANKS,
            common=True,
        ),
    ] = 1
    context_parallel_size: Annotated[
        int,
        about(
            "Context parallelism: number of ranks that divide the keys and values of each sequence, 512 "
            "tokens in turn, and long prompts.",
            ge=1,
            le=MOST_RANKS,
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        about("Pipeline parallelism: number of stages, each with some of the layers.", ge=1, le=MOST_RANKS),
    ] = 1
    pipeline_layers: Annotated[
        str, about("Layers of each stage, as in 9,7; auto = such that stages take about the same time.")
    ] = "auto"
    pipeline_micro_batches: Annotated[
        int, about("Steps under way at one time in a pipeline; 0 = two for each stage.", ge=0, le=MOST_STEPS)
    ] = 0
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
        int,
        about(
            "Processes that have all of the model but its experts, which are divided among them.", ge=1, le=MOST_RANKS
        ),
    ] = 1
    num_redundant_experts: Annotated[
        int, about("Further copies of each layer's most used experts, so that ranks have as much to do.", ge=0)
    ] = 0
    expert_load_file: Annotated[
        str, about("JSON file that keeps how often experts are used; at the start it says who holds which.")
    ] = ""
    data_parallel_size: Annotated[
        int,
        about(
            "Data parallelism: number of replicas behind one server. They divide threads and memory.",
            ge=1,
            le=MOST_RANKS,
        ),
    ] = 1
    prefill_replicas: Annotated[
        int, about("Disaggregated prefill: number of replicas that only compute prompts; 0 = all replicas do both.")
    ] = 0

    @property
    def ranks(self) -> int:
        """Processes of one engine."""
        sizes = self.pipeline_parallel_size, self.context_parallel_size, self.expert_parallel_size
        return math.prod(sizes) * self.tensor_parallel_size

    @property
    def steps_under_way(self) -> int:
        """Steps that are in flight at one time at most."""
        stages = self.pipeline_parallel_size
        return 1 if stages == 1 else self.pipeline_micro_batches or 2 * stages

    @property
    def pinned_layers(self) -> tuple[int, ...]:
        """Layers of each stage as they were asked for; none: they were not."""
        return () if self.pipeline_layers == "auto" else tuple(int(part) for part in self.pipeline_layers.split(","))

    @property
    def expert_axis(self) -> str:
        """The axis of ranks over which experts are divided; "" where none is."""
        return "expert" if self.expert_parallel_size > 1 else "tensor" if self.enable_expert_parallel else ""

    @property
    def ranks_option(self) -> str:
        """The option that asks for ranks, to name in errors."""
        return next((name for name in SIZES if getattr(self, name) > 1), "tensor_parallel_size")

    @property
    def processes(self) -> int:
        """Processes of all engines."""
        return self.ranks * self.data_parallel_size

    @property
    def features(self) -> frozenset[Feature]:
        """What is asked for, as far as it excludes something."""
        tensor, stages = self.tensor_parallel_size, self.pipeline_parallel_size
        return found(
            (TENSOR, tensor > 1), (ONE_TENSOR_RANK, tensor == 1), (STAGES, stages > 1), (ONE_STAGE, stages == 1),
            (MICRO_BATCHES, self.pipeline_micro_batches > 0), (CONTEXT, self.context_parallel_size > 1),
            (EXPERT_RANKS, self.expert_parallel_size > 1), (WHOLE_EXPERTS, self.enable_expert_parallel),
            (UNDIVIDED_EXPERTS, not self.expert_axis), (REDUNDANT_EXPERTS, self.num_redundant_experts > 0),
            (EXPERT_LOAD_FILE, bool(self.expert_load_file)), (SEQUENCE_PARALLEL, self.enable_sequence_parallel),
            (RANK_INVARIANT, self.rank_invariant), (REPLICAS, self.data_parallel_size > 1),
            (ONE_REPLICA, self.data_parallel_size == 1), (PREFILL_REPLICAS, self.prefill_replicas > 0),
        )  # fmt: skip

    def validate(self, drafts: Speculation | None) -> None:
        """Refuse values that cannot work, naming the option; `drafts`: how tokens are guessed ahead."""
        if not 0 <= self.prefill_replicas < self.data_parallel_size:
            raise ConfigError(
                f"--prefill-replicas {self.prefill_replicas}: of {self.data_parallel_size} engines "
                "(--data-parallel-size) at least one must be left, to go on with what these begin",
                param="prefill_replicas",
            )
        if self.ranks > MOST_RANKS:
            sizes = " times ".join(f"{flag(name)} {getattr(self, name)}" for name in SIZES if getattr(self, name) > 1)
            raise ConfigError(f"{sizes} are more than {MOST_RANKS} ranks", param=self.ranks_option)
        if drafts is not None:
            self._validate_drafts(drafts)
        self._validate_stages()

    def drafts_everywhere(self, drafts: Speculation) -> bool:
        """Whether every rank computes what drafts; otherwise the first does."""
        return drafts.everywhere and self.pipeline_parallel_size == self.context_parallel_size == 1

    def _validate_drafts(self, drafts: Speculation) -> None:
        size, own = drafts.draft_tensor_parallel_size, self.tensor_parallel_size
        sizes = {"draft_model": (0, 1, own), "self": (0, own)}.get(drafts.method, (0, 1))
        if drafts.method == "draft_model" and not self.drafts_everywhere(drafts):
            sizes = (0, 1)
        if size not in sizes:
            why = {"draft_model": "a draft model is computed by one rank or by all", "self": "the target is split so"}
            raise ConfigError(
                f"--speculative-draft-tensor-parallel-size {size}: with {drafts.method!r} it may be "
                f"{' or '.join(map(str, sorted({*sizes} - {0})))}: "
                f"{why.get(drafts.method, 'nothing of these drafts is split')}",
                param="speculative_draft_tensor_parallel_size",
            )

    def _validate_stages(self) -> None:
        stages = self.pipeline_parallel_size
        parts = self.pipeline_layers.split(",")
        if self.pipeline_layers != "auto" and not (
            len(parts) == stages > 1 and all(part.isascii() and part.isdecimal() and int(part) for part in parts)
        ):
            raise ConfigError(
                f"--pipeline-layers {self.pipeline_layers}: needs a number of layers for each of the {stages} stages "
                "of --pipeline-parallel-size, as in 9,7",
                param="pipeline_layers",
            )
