"""Rank 0's executor where others compute with it: they are told what it does itself, and what they answer is joined.
See docs/design/ranks.md.

Every rank has the same `LocalExecutor`; the others' is called by `worker_rank.Rank`, as messages say.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from quire.core.config import SchedulerConfig
from quire.core.plan import BlockWork
from quire.features.images.run_image_features import told
from quire.features.kv_store.run_block_bytes import joined_bytes
from quire.model.batch import Continues
from quire.model.load.roles import Share
from quire.model.net.multimodal import EmbeddedRows
from quire.model.net.pipeline_parallel import PipelineStage
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.run.blocks import Blocks, Keep, StoredBytes
from quire.run.builder import StepSizes
from quire.run.caches import Caches, kept_by
from quire.run.executor import Allocated, LocalExecutor
from quire.run.kv_budget import KVPlan
from quire.run.messages import Adapter, Encode, Forward, MoveBlocks
from quire.run.rank_group import Ranks
from quire.run.replies import ReplyForm
from quire.run.step import HeadRows, ModelStep


class MultiRankExecutor:
    """An `Executor` of `own`, this process's share, and of `ranks`, the others."""

    def __init__(self, own: LocalExecutor, ranks: Ranks) -> None:
        self.config, self.model, self.models, self.ops = own.config, own.model, own.models, own.ops
        self.ranks, self._own = ranks, own

    def profile(self, shape: KVPlan, limits: SchedulerConfig, kept: int = 0) -> int:
        """Implement `Executor`: the least of what all ranks have left."""
        self.ranks.profile(shape.max_model_len, limits)
        return self.ranks.least(self._own.profile(shape, limits, kept), self.ops)

    def allocate(self, kv: KVPlan, limits: SchedulerConfig) -> Allocated:
        """Implement `Executor`: the caches of all ranks are as large, and each computes its part of a step."""
        drafting, ranks = self._own.drafting, self.ranks
        alone = drafting is not None and drafting.first_rank_only
        ranks.allocate(kv, limits, alone, [each.window for each in kept_by((self.model,)).values()])
        own = self._own.allocate(kv, limits)
        drafts = own.drafts
        if drafts is not None and drafting is not None and drafting.everywhere:
            drafts = MultiRankStep(drafts, ranks, drafts=True)
        return Allocated(own.caches, self._blocks(own), MultiRankStep(own.step, ranks), drafts)

    def _blocks(self, own: Allocated) -> Blocks:
        stored = own.blocks.stored
        if stored is not None:
            comm = self.ranks.place.comm("tensor")
            assert comm is not None, "blocks of other ways to be parallel are kept in no store"
            stored = joined_bytes(stored, comm, self.ops)
        return MultiRankBlocks(own.caches, self.ops, stored, self.ranks)

    def change_adapter(self, name: str, folder: str, replaces: bool = False) -> None:
        """Implement `Executor`: here first, where it may be refused."""
        self._own.change_adapter(name, folder, replaces)
        self.ranks.tell(Adapter(name, folder, replaces))

    def check(self) -> None:
        """Implement `Executor`."""
        self.ranks.check()

    @property
    def killed(self) -> bool:
        """Implement `Executor`."""
        return self.ranks.killed

    def bubbles(self, seconds: float) -> tuple[float, ...]:
        """Implement `Executor`."""
        return self.ranks.bubbles(seconds)

    def close(self) -> None:
        """End the other ranks."""
        self.ranks.close()


class MultiRankStep:
    """A `ModelStep` that other ranks compute their shares of; `drafts`: it is one of the model that drafts."""

    def __init__(self, own: ModelStep, ranks: Ranks, drafts: bool = False) -> None:
        self.model, self.ops, self.caches, self.arrays = own.model, own.ops, own.caches, own.arrays
        self.hidden, self.most_logits, self.record_steps = own.hidden, own.most_logits, own.record_steps
        self._own, self._ranks, self._drafts = own, ranks, drafts
        self._replies = None if drafts else ranks.replies(own.ops, self._form)

    def forward(self, shape: StepSizes, given: EmbeddedRows | None = None) -> Array:
        """Have the other ranks compute their shares, and compute this one's; logits f32 [shape.logits, V]."""
        self._begin(shape, given)
        return self._own.forward(shape, given)

    def logits_in_pieces(self, shape: StepSizes, given: EmbeddedRows | None = None) -> Iterable[Array]:
        """The logits in pieces. Of stages, the first is done on return; the last replies as they are taken."""
        begin = time.perf_counter()
        self._begin(shape, given)
        own = self._own.logits_in_pieces(shape, given)
        self._ranks.busy[0] += time.perf_counter() - begin
        return own if self._replies is None else self._replies.expect(shape.logits)

    def head_rows(self, shape: StepSizes, given: EmbeddedRows | None = None) -> HeadRows:
        """Have the other ranks compute their shares; rank 0 has what the head reads."""
        self._begin(shape, given)
        return self._own.head_rows(shape, given)

    def scores(self, rows: HeadRows, places: list[int]) -> Iterable[Array]:
        """Logits by this rank alone, which has the head."""
        return self._own.scores(rows, places)

    def encode(self, tokens: NDArray[np.int32] | NDArray[np.float32], slots: NDArray[np.int64]) -> None:
        """Have all ranks compute the encoder's part."""
        self._ranks.tell(Encode(tokens.tobytes(), slots.tobytes(), self._drafts))
        self._own.encode(tokens, slots)

    def _begin(self, shape: StepSizes, given: EmbeddedRows | None) -> None:
        """What is in the arrays goes to all ranks first."""
        decoder, left = self.model.decoder, b""
        if isinstance(decoder, Continues):
            left = self.ops.host(decoder.given)[: shape.tokens].tobytes()
        arrays, seen = self.arrays.written(shape), None if given is None else told(given, self.ops)
        self._ranks.tell(Forward((*shape,), arrays, self._drafts, left, seen))
        self._ranks.compare(shape, arrays)

    def _form(self) -> ReplyForm:
        """Form of what comes back from the last stage."""
        stage, spec = self.model.decoder, self.model.spec
        assert isinstance(stage, PipelineStage), "steps of several stages are of one"
        if not stage.shared:
            return ReplyForm(spec.vocab_size, self.most_logits)
        batch = self.arrays.batches(1, 1, 1)[0]

        def part(h: Array) -> Array:
            begin = time.perf_counter()
            made = self.ops.compute(lambda: stage.part(h, batch), together=self.record_steps)
            self._ranks.busy[0] += time.perf_counter() - begin
            return made

        return ReplyForm(spec.vocab_size, self.most_logits, spec.embed_width, Share(1, 2).role("head", spec)[0], part)


class MultiRankBlocks(Blocks):
    """Blocks that other ranks have their parts of."""

    def __init__(self, caches: Caches, ops: Ops, stored: StoredBytes | None, ranks: Ranks) -> None:
        super().__init__(caches, ops, stored)
        self._ranks = ranks

    def apply(self, work: BlockWork, keep: Keep | None = None) -> None:
        """Do block work on all ranks."""
        if work:
            saves = tuple((save.block, save.state) for save in work.saves)
            fills = tuple((fill.block, fill.state) for fill in work.fills)
            self._ranks.tell(MoveBlocks(work.moves, saves, work.wipes, fills, work.copies))
        super().apply(work, keep)
