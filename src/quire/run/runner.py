"""Runs plans: blocks are moved, arrays filled, a step computed of them, and its logits sampled in a call of its own.
See docs/design/steps.md."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as GenericSequence

from quire.core.blame import Failed
from quire.core.plan import NO_WORK, BlockWork, Chunk, ChunkResult, LogitRow, StepPlan
from quire.core.sequence import Sequence, Status
from quire.features.images.run_image_features import ImageFeatures
from quire.features.pooling.run_pooling import add_vectors
from quire.features.pooling.run_sparse import SparseSums, take_logits
from quire.features.structured_output.run_grammar_masks import MaskBuilder
from quire.model.net.hidden_taps import picked
from quire.model.net.multimodal import EmbeddedRows
from quire.ops.arrays import Array, Fetched
from quire.run.blocks import Keep
from quire.run.builder import BatchBuilder, StepSizes
from quire.run.executor import Allocated
from quire.run.step import HeadRows
from quire.run.token_rows import token_rows
from quire.sample.sampler import NUMERICS, Drawn, RowResult, Sampler


class LaunchedStep:
    """A step whose forward pass was launched; `drawn` is there once it is sampled. `logits` and `drawn` in pieces.

    `hidden`: what the head would read of the rows `pooled`, which get no logits, [n, width] f32 on its way to the host.
    `failed`: its sequences that end with an error of their own, whatever their rows gave.
    """

    def __init__(
        self,
        plan: StepPlan,
        rows: list[LogitRow],
        logits: Iterable[Array],
        failed: Failed,
        pooled: GenericSequence[LogitRow] = (),
        hidden: Fetched | None = None,
    ) -> None:
        self.plan, self.rows, self.logits, self.failed = plan, rows, logits, failed
        self.pooled, self.hidden = pooled, hidden
        self.drawn, self.sampled = list[Drawn](), False


class Runner:
    """Runs plans on what an executor allocated: one plan is `forward`, `sample`, `results`, in this order.

    On a GPU the first two only tell it what to do, and `results` waits. So the forward pass of the next plan may be
    launched before the results of this one are known; it is sampled when they are, because the edits of logits
    (penalties, masks) are made from all tokens.
    """

    def __init__(self, allocated: Allocated, keep: Keep | None = None) -> None:
        """`keep` gets what plans save."""
        self.caches, self.step = allocated.caches, allocated.step
        self._blocks, self._save_block = allocated.blocks, keep
        model, ops = self.step.model, self.step.ops
        self.builder = BatchBuilder(self.step.arrays, model, self.caches.block_size)
        self.features = None if model.vision is None else ImageFeatures(model.vision, model.spec.sight)
        self._masks = MaskBuilder(model.spec.vocab_size)
        self.sampler = Sampler(ops, model.spec.vocab_size, self._masks)
        self.numeric_errors = 0
        self._fetch = ops.fetch

    def move_blocks(self, work: BlockWork) -> None:
        """Do what is to be done with whole blocks, of a plan or beside any."""
        self._blocks.apply(work, self._save_block)

    def forward(self, plan: StepPlan) -> LaunchedStep:
        """Do what `plan` says, but for drawing. Tokens that are not known yet are those that the last step draws."""
        if plan.blocks is not NO_WORK or self._blocks.coming:
            self.move_blocks(plan.blocks)
        if not plan.chunks:
            return LaunchedStep(plan, [], (), {})
        for chunk in plan.chunks:
            if chunk.start < chunk.seq.encoder.tokens:
                self.step.encode(*self.builder.encoded(chunk.seq))
            if chunk.seq.request.alignment is not None:
                chunk.seq.pooled = token_rows(self.step, self.builder, chunk.seq)
        if self.features is not None:
            self.features.follow(plan)
        (shape, rows), given, guided = self.builder.fill(plan.chunks), None, False
        if self.features is not None and self.builder.image_chunks:
            given = self.features.given(self.builder.image_chunks, self.step.arrays, shape.seqs, self.builder.failed)
        if any(chunk.logits and chunk.seq.request.pooling is not None for chunk in plan.chunks):
            return self._with_pooled(plan, rows, shape, given)
        for row in rows:
            guided = guided or row.seq.guide is not None
        if guided and len(rows) <= self.step.most_logits:  # else logits, and masks, are made in pieces
            self._masks.begin(rows)
        return LaunchedStep(plan, rows, self.step.logits_in_pieces(shape, given), self.builder.failed)

    def _with_pooled(
        self, plan: StepPlan, rows: list[LogitRow], shape: StepSizes, given: EmbeddedRows | None
    ) -> LaunchedStep:
        """The step's hidden rows: those of pooled requests are kept, of the others logits are made."""
        whole, others = self.step.head_rows(shape, given), list[int]()
        pooled: list[int] = []
        for i, row in enumerate(rows):
            (others if row.seq.request.pooling is None else pooled).append(i)
        self._keep_sparse(whole, rows, [i for i in pooled if rows[i].seq.request.pooling == "splade"])
        scores = self.step.scores(whole, others) if others else ()
        hidden = self._fetch([picked(whole.h, pooled)])
        drawn = [rows[i] for i in others]
        return LaunchedStep(plan, drawn, scores, self.builder.failed, [rows[i] for i in pooled], hidden)

    def _keep_sparse(self, whole: HeadRows, rows: list[LogitRow], places: list[int]) -> None:
        """Give sequences whose rows are at `places` their sparse vectors; logits are read piece by piece."""
        if not places:
            return
        sums = SparseSums(self.step.model.pooling.splade)
        logits = (self._fetch([piece])()[0] for piece in self.step.scores(whole, places))
        take_logits(sums, [rows[i] for i in places], logits)
        self.numeric_errors += sums.keep(self.builder.failed)

    def sample(self, step: LaunchedStep) -> LaunchedStep:
        """Edit the logits of `step` and draw its tokens; those of all steps before it were committed. Returns it."""
        if step.sampled:
            return step
        at, step.sampled = 0, True
        for logits in step.logits:
            if step.rows:
                whole = len(logits) == len(step.rows)
                step.drawn.append(self.sampler(logits, step.rows if whole else step.rows[at : at + len(logits)]))
                at += len(logits)
        if self.step.arrays.keeps_drawn:
            self.step.arrays.keep_drawn([piece.tokens for piece in step.drawn if piece.tokens is not None])
        self.builder.drew(step.rows)
        return step

    def blocks_next(self, step: LaunchedStep) -> bool:
        """Whether nothing may be launched behind `step`: its logits are made as they are asked for."""
        return len(step.rows) > self.step.most_logits

    def results(self, step: LaunchedStep) -> list[ChunkResult]:
        """What a sampled step found, a result per chunk in order, once the device has it."""
        found = self._verify_drafts(step.plan.chunks, step.rows, step.drawn)
        if step.hidden is not None:
            self.numeric_errors += add_vectors(step.plan.chunks, step.pooled, step.hidden()[0], found)
        for piece in step.drawn:
            step.failed |= piece.failed
        if step.failed:
            for i, chunk in enumerate(step.plan.chunks):
                if chunk.seq in step.failed:
                    found[i] = ChunkResult([], [], [], error=step.failed[chunk.seq])
        return found

    def _verify_drafts(self, chunks: tuple[Chunk, ...], rows: list[LogitRow], drawn: list[Drawn]) -> list[ChunkResult]:
        """Verify drafts: take the rows' tokens as long as the draft proposed the same, and one after them.

        Without a draft a chunk has one row, of node -1, and gives one token.
        """
        results, given = dict[int, ChunkResult](), list[RowResult]()
        for chunk in chunks:
            results[id(chunk.seq)] = ChunkResult([], [], [])
        for piece in drawn:
            given += piece.results()
        ends: dict[Sequence, int | None] = {}  # the node that the last token is, -1 before the first, None after others
        for row, found in zip(rows, given, strict=True):
            result = results[id(row.seq)]
            if found.error is not None and row.seq.draft.tokens:
                result.retry_without_draft = True
            if row.seq.status is Status.FINISHED or ends.get(row.seq, -1) != row.node or result.retry_without_draft:
                continue  # it ended while this step was under way, or other tokens came than this branch says
            if found.error is not None:
                self.numeric_errors += result.error is None and found.error is NUMERICS
                result.error = found.error
            elif row.target is not None:
                assert found.logprob is not None
                result.prompt_logprobs.append(found.logprob)
            else:
                result.tokens.append(found.token)
                if found.logprob is not None:
                    result.logprobs.append(found.logprob)
                ends[row.seq] = follows = row.seq.draft.matching_child(row.node, found.token)
                result.path += [] if follows is None else [follows]
            result.finite = result.error is None
        return list(results.values())
