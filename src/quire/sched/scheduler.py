"""Continuous batching with one rule: every step moves `computed` toward `target`, decodes first, under a token budget.
See docs/design/scheduler.md.

There is no phase flag (as in vLLM's v1 scheduler): `shares.decodes` derives it from `computed` and `target`. Chunked
prefill beside decodes is SARATHI (Agrawal et al. 2023); iteration-level admission is Orca (Yu et al. 2022). No tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as GenericSequence
from typing import Any

from quire.cache.tables import BlockTables
from quire.cache.tiers import Tiers
from quire.core.config import SchedulerConfig
from quire.core.errors import BadRequest, QuireError
from quire.core.plan import NO_WORK, BlockWork, Chunk, ChunkResult, Save, StepPlan
from quire.core.request import FinishReason, Output, Request
from quire.core.sequence import Sequence, StateSlot, Status
from quire.features.feature import FeatureHooks
from quire.features.images.plan_images import EncoderScheduler
from quire.features.pooling.plan_pooling import PoolingFeature
from quire.features.structured_output.plan_structured_output import Make, SlowGuides
from quire.sched.admission import BatchAdmission
from quire.sched.growth import PromptLogprobs, append, ended, moves, pending
from quire.sched.policy import POLICIES
from quire.sched.queues import SequenceQueues
from quire.sched.state_snapshots import StateSnapshots
from quire.sched.token_budget import MicroBatches, PrefillPace, budget_of, divide_budget, taken


class PendingBlockWork:
    """Gathers work on whole blocks for the next step: wipes, moves, and what `tiers` want to be saved and filled."""

    def __init__(self, tiers: Tiers | None) -> None:
        self._tiers = tiers
        self.wipes: list[int] = []
        self.moves: list[tuple[int, int, int]] = []

    def take(self, copies: GenericSequence[tuple[int, int]] = (), more: GenericSequence[Save] = ()) -> BlockWork:
        """What was gathered since the last call, the block copies of a plan, and `more` blocks to be saved."""
        saves, fills = ((), ()) if self._tiers is None else self._tiers.take()
        if not (self.wipes or self.moves or saves or fills or copies or more):
            return NO_WORK
        (wipes, self.wipes), (moves, self.moves) = (self.wipes, []), (self.moves, [])
        return BlockWork(tuple(moves), (*saves, *more), tuple(wipes), fills, tuple(copies))


class Scheduler:
    """Owns every sequence from `add` to its last `Output`. `portions`: of steps, where several stages compute;
    `encoding`: of images, where the model takes any; `make_guide`: of a sequence that has a grammar."""

    def __init__(
        self,
        config: SchedulerConfig,
        tables: BlockTables,
        max_model_len: int,
        portions: MicroBatches | None = None,
        encoding: EncoderScheduler | None = None,
        make_guide: Make | None = None,
    ) -> None:
        self.config, self.encoding = config, encoding
        self.clock: Callable[[], float] = time.monotonic
        self._portions = portions or MicroBatches()
        self.tables, self.max_model_len = tables, max_model_len
        self.policy = POLICIES[config.scheduling_policy]()
        self.room = room = SequenceQueues(self.policy, tables, config.max_num_seqs, make_guide)
        self.waiting, self.running, self.recall, self.readying = room.queue, room.running, room.recall, room.readying
        states = None if tables.states is None else StateSnapshots(tables.states)
        slow = SlowGuides(lambda: self.clock())
        self.hooks = FeatureHooks(slow, PoolingFeature(), PromptLogprobs(), encoding, states)
        self.requests, self.preemptions, self._tickets = dict[str, list[Sequence]](), 0, 0
        self.block_work = PendingBlockWork(tables.tiers)
        self.pace = PrefillPace(config.target_itl_ms / 1000)
        self._ended: list[Output] = []  # by no result of a step; told with the next
        self._admission = BatchAdmission(config, tables, room, self.policy)

    def add(self, request: Request) -> None:
        """Queue a request; BadRequest if it could never run."""
        if request.id in self.requests:
            raise BadRequest(f"request id {request.id!r} is in use", param="request_id")
        first, self._tickets = Sequence(request, 0, self.max_model_len), self._tickets + 1
        self._admission.check(first, self.max_model_len)
        siblings = [first, *(Sequence(request, i, self.max_model_len) for i in range(1, request.params.n))]
        for seq in siblings:
            seq.order = self.policy.order(seq, self._tickets)
            seq.state = None if self.tables.states is None else StateSlot()
        self.policy.joins(request)
        self.hooks.joins(request)
        self.requests[request.id] = siblings
        self.room.begin(siblings)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request, or one of its sequences, at any moment between steps and free what it holds."""
        siblings = self.requests.get(request_id, [])
        for seq in siblings if index is None else siblings[index : index + 1]:
            if seq.status is not Status.FINISHED:
                self._finish(seq, "abort")
        self.room.begin_again(siblings)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is not finished."""
        return self.room.occupied

    def may_plan_ahead(self) -> bool:
        """Whether `plan` may be called before the last plan is committed: the next step without its tokens' values.

        It may not where the next step depends on them:
        - a draft is in flight: how many tokens it gives is not known (with stages, nobody is in two steps then);
        - blocks are lacking, or one that is more urgent waits: who is preempted depends on who ends.
        Edited logits are no obstacle, as a step is sampled when the one before is committed; nor is what may end a
        sequence: a row after an end, a failure or an abort is computed and thrown away. To ask changes nothing.
        """
        drafted = not self._portions.staged and any(s.in_flight and s.draft.tokens for s in self.unfinished())
        if drafted or (self.room.queued and self._admission.displaced() is not None):
            return False
        return self.tables.fit(self._shares()[0])

    def plan(self) -> StepPlan:
        """Decide the next step.

        The plan is as good as done: `computed` and `in_flight` of its sequences say what will be after it.
        """
        admission = self._admission
        admission.closed = admission.closed and bool(self.running)
        self._take_back(planning=True)
        chunks, copies, preempted = list[Chunk](), list[tuple[int, int]](), list[Sequence]()
        while self.room.queued and (last := admission.gives_way()) is not None:
            self._preempt(last)
            preempted.append(last)
        urgent = bool(preempted)
        counts, unseeing, budget = self._shares()
        if self._portions.staged:
            self._portions.began(self.unfinished())
        for seq in unseeing:
            self.room.sees(seq, image=False)
        todo = sorted(counts, key=self.policy.rank) if len(counts) > 1 else list(counts)
        while todo:
            count = counts[seq := todo.pop(0)]
            if count and seq.draft.tokens:
                seq.draft.cut(seq.target - seq.computed - count)
                if seq.draft.tokens and not self._reserve(seq, count, copies):
                    count, seq.draft.tokens = count - len(seq.draft.tokens), []  # a guess is not worth another's blocks
                self.tables.trim(seq)  # what was cut may serve who comes next
            while count and not self._reserve(seq, count, copies):
                victim = max([seq, *todo], key=self.policy.rank)
                self._preempt(victim)
                preempted.append(victim)
                if victim is seq:
                    count = 0
                else:
                    todo.remove(victim)
            if count:
                chunks.append(self._advance(seq, count))
        if self.room.queued and (urgent or not preempted):
            self._admit(chunks, copies, max(0, budget - sum(chunk.rows for chunk in chunks)))
        carried = dict[str, Any]()
        for planned in self.hooks.planned:
            carried |= planned(chunks)
        if len(chunks) > 1:
            chunks.sort(key=lambda chunk: chunk.count > 1 + len(chunk.seq.draft.tokens))
        blocks = self.block_work.take(copies)
        return StepPlan(chunks=tuple(chunks), blocks=blocks, preempted=tuple(preempted), **carried)

    def _shares(self) -> tuple[dict[Sequence, int], list[Sequence], int]:
        """Rows of each that runs in the next step, who gets none for want of an image, and how many it has at most."""
        head = self.waiting.head() if self.room.queued and self._admission.may_admit() else None
        running, unseeing = self.unfinished(), list[Sequence]()
        if self._portions.staged:
            running = self._portions.ready(running)
        budget = budget_of(self.config, self.pace, self._portions, self.running)
        counts = divide_budget(running, budget, self.config.enable_chunked_prefill, head, self.policy.urgency)
        for limit in self.hooks.limit:
            unseeing += limit(counts, self.policy.rank)
        return counts, unseeing, budget

    def _admit(self, chunks: list[Chunk], copies: list[tuple[int, int]], budget: int) -> None:
        while (found := self._admission.next(budget)) is not None:
            seq, count = found
            for reach in self.hooks.reach:
                count = reach(seq, count)
            if not self._reserve(seq, count, copies):
                return
            self.room.admit()
            seq.times.first_scheduled = seq.times.first_scheduled or self.clock()
            if count:
                chunks.append(self._advance(seq, count))
            else:  # it waits for an image, and nobody waits behind it
                self.room.sees(seq, image=False)
            budget -= taken(seq, count)

    def unfinished(self) -> list[Sequence]:
        """What runs and has not all its tokens made or in flight."""
        return [s for s in self.running if len(s.tokens) + s.in_flight < s.limit]

    def _advance(self, seq: Sequence, count: int) -> Chunk:
        """Take `count` tokens of `seq` into the step.

        Logits are of the row that ends the sequence, of its draft's rows, and of those that a feature wants. Where
        blocks may slide out unpublished, also of the last row of any chunk: it proves them finite in time.
        """
        if seq.status is not Status.RUNNING:
            self.room.sees(seq, image=True)
        draws = seq.computed + count == seq.target
        logits = 1 + len(seq.draft.tokens) if draws else int(self.tables.loses)
        for wants in self.hooks.logits:
            logits = max(logits, wants(seq, count))
        state = self.tables.advance(seq, seq.computed + count, self.requests[seq.request.id])
        chunk = Chunk(seq, seq.computed, count, logits, state)
        seq.computed += count
        seq.in_flight, seq.steps_in_flight = seq.in_flight + draws, seq.steps_in_flight + 1
        if self.policy.counts:
            self.policy.served(seq, count)
        for takes in self.hooks.takes:
            takes(chunk)
        return chunk

    def _reserve(self, seq: Sequence, count: int, copies: list[tuple[int, int]]) -> bool:
        upto, reserve = seq.computed + count, self.tables.reserve
        return reserve(seq, upto, copies) or (self.room.reclaim(seq) and reserve(seq, upto, copies))

    def _preempt(self, seq: Sequence) -> None:
        """Give up the blocks and wait again; all tokens are kept. A sequence that outgrew the whole pool ends here."""
        seq.draft.tokens = []
        if self.tables.sizes.footprint(seq.target) > self.tables.pool.num_blocks:
            self._finish(seq, "length")
            self._ended.append(ended(seq))
            return
        self._admission.closed = True
        self.preemptions += 1
        self.room.preempt(seq)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        if seq in self.running:  # a static batch takes no more once the first has left
            self._admission.closed = True
        self.room.end(seq, reason)
        siblings = self.requests[seq.request.id]
        if all(s.status is Status.FINISHED for s in siblings):
            del self.requests[seq.request.id]
            self.policy.leaves(seq.request)
            self.hooks.leaves(seq.request)

    def _take_back(self, planning: bool) -> None:
        for seq, error in self.room.take_back(planning) if self.room.away else ():
            self.fail(seq, error)

    def commit(self, plan: StepPlan, results: list[ChunkResult]) -> list[Output]:
        """Append what the runner found, publish full blocks, fork siblings, end what is done.

        Results of what ended meanwhile, by a token that was not known when this step was planned, are dropped.
        """
        now, size, outputs = self.clock(), self.tables.block_size, list[Output]()
        for chunk, result in zip(plan.chunks, results, strict=True):
            seq = chunk.seq
            seq.steps_in_flight -= 1
            if seq.status is Status.FINISHED:
                continue
            if result.retry_without_draft:
                self.block_work.wipes += self.tables.unpublished(seq)
                seq.draft.enabled, seq.in_flight = False, 0
                self._preempt(seq)
                continue
            output = Output(request_id=seq.request.id, index=seq.index, cached_tokens=seq.kv.cached_tokens)
            if result.path:
                self.block_work.moves += moves(seq, result.path, size)
            reason = append(chunk, result, output, now)
            if result.error is not None:
                self.fail(seq, result.error)
                continue
            done = min(chunk.start + chunk.count, len(seq.tokens) - 1)
            if result.finite and done >= (seq.kv.published + 1) * size:
                # Only now is it known that the values are finite: inf or nan would have reached these logits.
                self.tables.publish(seq, done)
            if seq.kv.blocks and len(seq.kv.blocks[0]) * size >= seq.target + size:
                self.tables.trim(seq)
            if chunk.start < seq.prompt_len <= done:
                self.room.fork(seq, pending(self.requests[seq.request.id]))
            if self.tables.slides:
                self.tables.slide(seq, done)
            if reason is not None:
                self._finish(seq, reason)
                output.finish_reason, output.stop_token = reason, seq.stop_token
                output.timing = seq.timing
            if output.tokens or output.finish_reason:
                outputs.append(output)
        self._take_back(planning=False)
        outputs, self._ended = self._ended + outputs, []
        return outputs

    def fail(self, seq: Sequence, error: QuireError) -> None:
        """End `seq`, and siblings that would have grown from it; `commit` puts the error out. Its blocks are wiped."""
        for fails in self.hooks.fails:
            fails(seq, error)
        self.block_work.wipes += self.tables.unpublished(seq)
        for each in (seq, *pending(self.requests[seq.request.id])):
            self._finish(each, "error")
            self._ended.append(ended(each, error))
