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
    data_parallel_size: Annotated[
        int, about("Engines of the whole model behind one server, every one with its part of threads and memory.")
    ] = 1

    @property
    def ranks(self) -> int:
        """Processes of one engine."""
        return self.tensor_parallel_size

    @property
    def processes(self) -> int:
        """That share this machine."""
        return self.ranks * self.data_parallel_size

    def validate(self, drafts: Speculation | None) -> None:
        """Refuse what cannot work, naming the option; `drafts`: how tokens are guessed ahead."""
        for name in ("tensor_parallel_size", "data_parallel_size"):
            if not 1 <= getattr(self, name) <= MOST_RANKS:
                raise ConfigError(f"--{name.replace('_', '-')} must lie in [1, {MOST_RANKS}]", param=name)
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
