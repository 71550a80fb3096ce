"""Continuous batching with one rule: every step moves `computed` toward `target`, decodes first, under a token budget.

There is no prefill or decode phase (the rule of vLLM's v1 scheduler); chunked prefill that rides along with decodes is
SARATHI (Agrawal et al. 2023); iteration-level admission is Orca (Yu et al. 2022). No tensors here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from quire.cache.tables import BlockTables, added
from quire.core.config import SchedulerConfig
from quire.core.errors import BadRequest, QuireError
from quire.core.plan import Chunk, ChunkResult, StepPlan
from quire.core.request import FinishReason, Output, Request
from quire.core.sequence import Sequence, Status
from quire.sched.admission import Admission
from quire.sched.growth import append, ended, full, logits_wanted, moves, pending, timing
from quire.sched.pace import Pace
from quire.sched.pictures import Encoding, Turn
from quire.sched.policy import POLICIES
from quire.sched.readying import Make
from quire.sched.shares import Portions, decodes, rows_of, shares
from quire.sched.slow_guides import SlowGuides
from quire.sched.upkeep import Upkeep
from quire.sched.waiting_room import WaitingRoom


class Division(NamedTuple):
    """Rows of each running sequence in a step, the `turn` of pictures, and who gets no row for want of one."""

    counts: dict[Sequence, int]
    turn: Turn | None
    unseeing: list[Sequence]


class Scheduler:
    """Owns every sequence from `add` to its last `Output`. `portions`: of steps, where several stages compute;
    `encoding`: of pictures, where the model takes any; `make_guide`: of a sequence that has a grammar."""

    def __init__(
        self,
        config: SchedulerConfig,
        tables: BlockTables,
        max_model_len: int,
        portions: Portions | None = None,
        encoding: Encoding | None = None,
        make_guide: Make | None = None,
    ) -> None:
        self.config, self.encoding = config, encoding
        self.clock: Callable[[], float] = time.monotonic
        self._portions = portions or Portions()
        self.tables, self.max_model_len = tables, max_model_len
        self.policy = POLICIES[config.scheduling_policy]()
        self.room = room = WaitingRoom(self.policy, tables, config.max_num_seqs, make_guide)
        self.waiting, self.running, self.recall, self.readying = room.queue, room.running, room.recall, room.readying
        self.requests: dict[str, list[Sequence]] = {}
        self.preemptions = self._tickets = 0
        self.upkeep, self._closed = Upkeep(tables.tiers), False
        self.pace = Pace(config.target_itl_ms / 1000)
        self._slow_guides = SlowGuides(lambda: self.clock())
        self._ended: list[Output] = []  # by no result of a step; told with the next
        self._admission = Admission(config, tables, room, self.policy)

    def add(self, request: Request) -> None:
        """Queue a request; BadRequest if it could never run."""
        if request.id in self.requests:
            raise BadRequest(f"request id {request.id!r} is in use", param="request_id")
        first, self._tickets = Sequence(request), self._tickets + 1
        self._admission.check(first, self.max_model_len)
        siblings = [first, *(Sequence(request, i, first) for i in range(1, request.params.n))]
        for seq in siblings:
            seq.order = self.policy.order(seq, self._tickets)
        self.policy.joins(request)
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
        sequence: a row after an end token, after a failure or of an aborted request is computed and thrown away.
        To ask changes nothing.
        """
        drafted = not self._portions.staged and any(s.in_flight and s.draft for s in self.unfinished())
        if drafted or self._admission.displaced() is not None:
            return False
        counts, missing = self._shares(self._budget()).counts, self.tables.missing
        needs = [missing(seq, seq.computed + count) for seq, count in counts.items() if count]
        return not needs or self.tables.pool.fits(added(needs))

    def plan(self) -> StepPlan:
        """Decide the next step.

        The plan is as good as done: `computed` and `in_flight` of its sequences say what will be after it.
        """
        self._closed = self._closed and bool(self.running)
        self._take_back(planning=True)
        chunks, copies, preempted = list[Chunk](), list[tuple[int, int]](), list[Sequence]()
        while (last := self._admission.gives_way()) is not None:
            self._preempt(last)
            preempted.append(last)
        urgent, budget = bool(preempted), self._budget()
        counts, turn, unseeing = self._shares(budget)
        if self._portions.staged:
            self._portions.began(self.unfinished())
        for seq in unseeing:
            self.room.sees(seq, picture=False)
        todo = sorted(counts, key=self.policy.rank)
        while todo:
            seq = todo.pop(0)
            count = counts[seq]
            if count and seq.draft:
                seq.cut(count)
            if count and seq.draft and not self._reserve(seq, count, copies):
                count, seq.draft = count - len(seq.draft), []  # a guess is not worth another's blocks
            while count and not self._reserve(seq, count, copies):
                victim = max([seq, *todo], key=self.policy.rank)
                self._preempt(victim)
                preempted.append(victim)
                if victim is seq:
                    count = 0
                else:
                    todo.remove(victim)
            if count:
                chunks.append(self._advance(seq, count, turn))
        if urgent or not preempted:
            self._admit(chunks, copies, max(0, budget - sum(chunk.count for chunk in chunks)), turn)
        self._slow_guides.began(chunks)
        chunks.sort(key=lambda chunk: chunk.count > 1 + len(chunk.seq.draft))
        encodes, drops = ((), ()) if self.encoding is None or turn is None else self.encoding.end(turn)
        return StepPlan(chunks=tuple(chunks), blocks=self.upkeep.take(copies), preempted=tuple(preempted),
                        encodes=encodes, drops=drops)  # fmt: skip

    def _shares(self, budget: int) -> Division:
        """What each running sequence would have of the next step."""
        chunked = self.config.enable_chunked_prefill
        head = self.waiting.head() if self._admission.may_admit() else None
        counts = shares(self._portions.ready(self.unfinished()), budget, chunked, head, self.policy.urgency)
        counts |= dict.fromkeys(self._slow_guides.resting(counts), 0)
        if self.encoding is None:
            return Division(counts, None, [])
        turn = self.encoding.turn(counts)
        return Division(counts, turn, turn.cut(counts, self.policy.rank))

    def _budget(self) -> int:
        """Tokens of the next step at most."""
        rows = sum(1 + len(seq.draft) for seq in self.running if decodes(seq)) if self.pace.limits else 0
        return self.pace.budget(rows, self._portions.budget(self.config, self.running))

    def _admit(self, chunks: list[Chunk], copies: list[tuple[int, int]], budget: int, turn: Turn | None) -> None:
        if self.config.static_batching and self._closed:
            return
        while len(self.waiting) and budget and len(self.running) < self.config.max_num_seqs:
            seq = self.waiting.head()
            if not seq.blocks:
                if self.room.recall_head():
                    continue
                self.tables.take_prefix(seq)
                self.room.holds(seq)
            count = rows_of(seq, budget, self.config.enable_chunked_prefill)
            if not count or not self._admission.fits(seq):
                return
            if turn is not None:
                count = turn.reach(seq, count)
            if not self._reserve(seq, count, copies):
                return
            self.room.admit()
            seq.first_scheduled = seq.first_scheduled or self.clock()
            if count:
                chunks.append(self._advance(seq, count, turn))
            else:  # it waits for a picture, and nobody waits behind it
                self.room.sees(seq, picture=False)
            budget -= count

    def unfinished(self) -> list[Sequence]:
        """What runs and has not all its tokens made or in flight."""
        return [s for s in self.running if not full(s, len(s.tokens) + s.in_flight, self.max_model_len)]

    def _advance(self, seq: Sequence, count: int, turn: Turn | None) -> Chunk:
        """Take `count` tokens of `seq` into the step."""
        self.room.sees(seq, picture=True)
        draws = seq.computed + count == seq.target
        chunk = Chunk(seq, seq.computed, count, logits_wanted(seq, count, self.tables.loses))
        seq.computed += count
        seq.in_flight, seq.steps = seq.in_flight + draws, seq.steps + 1
        self.policy.served(seq, count)
        if self.encoding is not None and turn is not None:
            self.encoding.take(turn, chunk)
        return chunk

    def _reserve(self, seq: Sequence, count: int, copies: list[tuple[int, int]]) -> bool:
        upto, reserve = seq.computed + count, self.tables.reserve
        return reserve(seq, upto, copies) or (self.room.reclaim(seq) and reserve(seq, upto, copies))

    def _preempt(self, seq: Sequence) -> None:
        """Give up the blocks and wait again; all tokens are kept. A sequence that outgrew the whole pool ends here."""
        seq.draft = []
        if self.tables.sizes.footprint(seq.target) > self.tables.pool.num_blocks:
            self._finish(seq, "length")
            self._ended.append(ended(seq))
            return
        self._closed, self.preemptions = True, self.preemptions + 1
        self.room.preempt(seq)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        self._closed = self._closed or seq in self.running  # a static batch takes no more once the first has left
        self.room.end(seq, reason)
        siblings = self.requests[seq.request.id]
        if all(s.status is Status.FINISHED for s in siblings):
            del self.requests[seq.request.id]
            self.policy.leaves(seq.request)

    def _take_back(self, planning: bool) -> None:
        for seq, error in self.room.take_back(planning):
            self.fail(seq, error)

    def commit(self, plan: StepPlan, results: list[ChunkResult]) -> list[Output]:
        """Append what the runner found, publish full blocks, fork siblings, end what is done.

        Results of what ended meanwhile, by a token that was not known when this step was planned, are dropped.
        """
        now, outputs = self.clock(), list[Output]()
        for chunk, result in zip(plan.chunks, results, strict=True):
            seq = chunk.seq
            seq.steps -= 1
            if seq.status is Status.FINISHED:
                continue
            if result.again:
                self.upkeep.wipes += self.tables.unpublished(seq)
                seq.draftable, seq.in_flight = False, 0
                self._preempt(seq)
                continue
            output = Output(request_id=seq.request.id, index=seq.index, cached_tokens=seq.cached_tokens)
            self.upkeep.moves += moves(seq, result.path, self.tables.sizes.block_size)
            reason = append(chunk, result, output, now, self.max_model_len)
            if result.error is not None:
                self.fail(seq, result.error)
                continue
            done = min(chunk.start + chunk.count, len(seq.tokens) - 1)
            if result.finite:
                # Only now is it known that the values are finite: inf or nan would have reached these logits.
                self.tables.publish(seq, done)
            self.tables.trim(seq)
            if chunk.start < seq.prompt_len <= done:
                self._fork(seq)
            self.tables.slide(seq, done)
            if reason is not None:
                self._finish(seq, reason)
                output.finish_reason, output.stop_token = reason, seq.stop_token
                output.timing = timing(seq)
            if output.tokens or output.finish_reason:
                outputs.append(output)
        self._take_back(planning=False)
        outputs, self._ended = self._ended + outputs, []
        return outputs

    def _fork(self, parent: Sequence) -> None:
        for child in pending(self.requests[parent.request.id]):
            self.tables.fork(parent, child)
            self.room.enter(child, (parent,))

    def fail(self, seq: Sequence, error: QuireError) -> None:
        """End `seq`, and siblings that would have grown from it; `commit` puts the error out. Its blocks are wiped."""
        if self.encoding is not None:
            self.encoding.failed(seq, error)
        self.upkeep.wipes += self.tables.unpublished(seq)
        for each in (seq, *pending(self.requests[seq.request.id])):
            self._finish(each, "error")
            self._ended.append(ended(each, error))
