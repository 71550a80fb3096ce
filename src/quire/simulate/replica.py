"""One replica: the real scheduler over block tables without tensors, whose time is made of predicted steps."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from quire.cache.blocks import BlockPool
from quire.cache.groups import TableSizes
from quire.cache.prefix import PrefixCache
from quire.cache.states import StateSlots
from quire.cache.tables import BlockTables
from quire.cache.tiers import Tiers
from quire.core.config import SchedulerConfig
from quire.core.plan import ChunkResult, StepPlan
from quire.core.request import Output, Request
from quire.plan.rates import PlannedChunk, StepTimes
from quire.run.kv_budget import NO_STATES, StatePlan
from quire.sched.policy import Policy
from quire.sched.scheduler import Scheduler
from quire.simulate.steady import advance, next_decodes, serve
from quire.simulate.step_times import decode_times

SECRET = bytes(32)
"""Of the chains of prefix caches: the same in every run."""


class MigratedRequest(NamedTuple):
    """A request that leaves a replica: its tokens so far, and when the last of them came."""

    request: Request
    made: list[int]
    last: float


class StepMeter(Protocol):
    """Is told of the steps of all replicas."""

    def gaps(self, seconds: float, tenants: dict[str, int]) -> None:
        """Note that so many sequences of each tenant waited so long for a token after one."""
        ...

    def stepped(self, steps: int, rows: int, seconds: float) -> None:
        """Note that so many steps computed so many rows in all."""
        ...


@dataclass(frozen=True)
class Setup:
    """What every replica has: limits of its scheduler, KV blocks, and tokens of a sequence at most.

    `windows`: tokens that each group of layers sees (0: all). `states`: slots of recurrent states, and tokens between
    snapshots. `fast`: steps in which nothing changes are done together.
    """

    scheduler: SchedulerConfig
    blocks: int
    block_size: int
    max_model_len: int
    prefix_caching: bool = True
    windows: tuple[int, ...] = (0,)
    states: StatePlan = NO_STATES
    fast: bool = True

    @property
    def limits(self) -> SchedulerConfig:
        """Limits of the scheduler: without chunks a step has room for the longest prompt (`SchedulerConfig.rows`)."""
        return replace(self.scheduler, max_num_batched_tokens=self.scheduler.rows(self.max_model_len))


class Replica:
    """Between `begin` and `finish` a step is under way, or several that only decode, until the time `until`."""

    def __init__(
        self,
        setup: Setup,
        times: StepTimes,
        clock: Callable[[], float],
        meter: StepMeter,
        tiers: Callable[[], Tiers] | None = None,
    ) -> None:
        """`tiers`: makes what is behind the pool, where there is a store."""
        self.setup, self._times, self._clock, self._meter, self._tiers = setup, times, clock, meter, tiers
        self._decode_times = decode_times(times)
        self.until: float | None = None
        self.version = 0
        self._preemptions = self._queries = self._hits = 0
        self._fill()

    def _fill(self) -> None:
        """Fill the replica as an engine that was just started."""
        setup = self.setup
        tiers = None if self._tiers is None else self._tiers()
        self.pool = BlockPool(setup.blocks, remembered=0, watcher=tiers)
        states, interval = None, setup.states.interval if setup.prefix_caching else 0
        if setup.states.slots:
            slots, most = setup.states.slots, setup.scheduler.max_num_seqs
            states = StateSlots(slots, setup.block_size, interval, most, tiers)
        found = None if states is None else states.pool
        shares = setup.prefix_caching
        self.prefix = PrefixCache(self.pool, setup.block_size, SECRET, states=found) if shares else None
        sizes = TableSizes(setup.block_size, setup.scheduler.rows(setup.max_model_len), setup.windows)
        tables = BlockTables(self.pool, self.prefix, sizes, tiers, states)
        self.scheduler = Scheduler(setup.limits, tables, setup.max_model_len)
        self.scheduler.clock = self._clock
        self._plan: StepPlan | None = None
        self._ends: list[float] = []
        self._inbox: list[tuple[Request | str, float, float]] = []
        self._refused, self._seconds = False, 0.0
        self.until, self.version = None, self.version + 1

    # ------------------------------------------------------------------------------------------------------- requests

    def submit(self, request: Request, first: float = 0.0, last: float = 0.0) -> None:
        """Queue a request, of a length that can run, before the next step; its first and last token came then where
        it began elsewhere."""
        self._inbox.append((request, first, last))
        full = len(self.scheduler.running) >= self.setup.scheduler.max_num_seqs
        if not (full and type(self.scheduler.policy) is Policy):  # else it cannot matter before somebody ends
            self._shorten()

    def abort(self, request_id: str) -> None:
        """Drop a request before the next step."""
        self._inbox.append((request_id, 0.0, 0.0))
        self._shorten()

    def give(self, request_id: str) -> MigratedRequest | None:
        """Drop a request, and return what there is of it; None where it has ended."""
        self._catch_up()
        siblings = self.scheduler.requests.get(request_id)
        if siblings is None:
            return None
        self.abort(request_id)
        return MigratedRequest(siblings[0].request, list(siblings[0].output), siblings[0].times.last_token)

    def die(self) -> list[MigratedRequest]:
        """Lose everything; returns what there was of each request by now."""
        self._catch_up()
        gone = {what for what, _, _ in self._inbox if isinstance(what, str)}
        lost = [
            MigratedRequest(s.request, list(s.output), s.times.last_token) for s, *_ in self.scheduler.requests.values()
        ]
        lost += [
            MigratedRequest(what, list(_emitted(what)), last)
            for what, _, last in self._inbox
            if not isinstance(what, str)
        ]
        self._preemptions, (self._queries, self._hits) = self.preemptions, self.lookups
        self._fill()
        return [each for each in lost if each.request.id not in gone]

    def _take_inbox(self) -> None:
        """Between steps, as an engine reads what its edge sent."""
        for what, first, last in self._inbox:
            if isinstance(what, str):
                self.scheduler.abort(what)
                continue
            self.scheduler.add(what)
            if what.emitted:
                seq = self.scheduler.requests[what.id][0]
                seq.times.first_token, seq.times.last_token = first, last
        self._refused = self._refused and not self._inbox
        self._inbox.clear()

    # ---------------------------------------------------------------------------------------------------------- steps

    def begin(self) -> float | None:
        """Start the next step or steps; returns when they end, None where there is nothing to do."""
        assert self.until is None, "a step is under way"
        now, scheduler = self._clock(), self.scheduler
        self._take_inbox()
        if not scheduler.has_work:
            return None
        steps = next_decodes(scheduler, now, self._refused) if self.setup.fast else 0
        if steps:
            contexts = [seq.computed for seq in scheduler.running]
            self._ends = list(accumulate(self._decode_times(contexts, steps), initial=now))
        else:
            self._plan = scheduler.plan()
            if not self._plan.chunks and not self._plan.preempted:
                self._plan = None
                return None  # all wait for a store
        self.version += 1
        self.until = self._ends[-1] if self._plan is None else now + self._predict(self._plan)
        return self.until

    def finish(self) -> list[Output]:
        """End what is under way: it is `until`."""
        assert self.until is not None and self.until == self._clock(), "called when it ends"
        self.until = None
        return self._run_ends() if self._ends else self._step_ends()

    def _shorten(self) -> None:
        """Let the step that is under way be the last of its run."""
        at = max(1, bisect_left(self._ends, self._clock()))
        if at < len(self._ends) - 1:
            del self._ends[at + 1 :]
            self.until, self.version = self._ends[-1], self.version + 1

    def _catch_up(self) -> None:
        """Do the steps of a run that have ended by now; what is under way is the run from here."""
        done = bisect_left(self._ends, self._clock()) - 1
        if done > 0:
            self._run(self._ends[: done + 1])
            self._ends = self._ends[done:]

    def _run_ends(self) -> list[Output]:
        ends, self._ends = self._ends, []
        outputs = self._run(ends)
        self._refused = self._refused and not outputs
        return outputs

    def _run(self, ends: list[float]) -> list[Output]:
        """Do the steps that end at these times but the first, when they began."""
        running, steps = self.scheduler.running, len(ends) - 1
        tenants = dict(Counter(seq.request.tenant for seq in running))
        for begin, end in pairwise(ends):
            self._meter.gaps(end - begin, tenants)
        self._meter.stepped(steps, steps * len(running), ends[-1] - ends[0])
        serve(self.scheduler, steps)
        return advance(self.scheduler, steps, ends[-1])

    def _step_ends(self) -> list[Output]:
        plan, self._plan = self._plan, None
        assert plan is not None
        now, decoding, tenants = self._clock(), True, dict[float, dict[str, int]]()
        results = []
        for chunk in plan.chunks:
            seq = chunk.seq
            draws = chunk.logits > 0 and chunk.start + chunk.count == len(seq.tokens)
            if draws and len(seq.tokens) > seq.prompt_len:
                told = tenants.setdefault(now - seq.times.last_token, {})
                told[seq.request.tenant] = told.get(seq.request.tenant, 0) + 1
            decoding = decoding and draws and chunk.count == 1
            results.append(ChunkResult([seq.request.seed] if draws else [], [], [], finite=chunk.logits > 0))
        for gap, counts in tenants.items():
            self._meter.gaps(gap, counts)
        outputs = self.scheduler.commit(plan, results)
        self._meter.stepped(1, plan.num_tokens, self._seconds)
        self.scheduler.pace.learn(plan, self._seconds)
        alone = len(plan.chunks) == len(self.scheduler.running) and not plan.preempted
        self._refused = decoding and alone and not any(out.finish_reason for out in outputs)
        return outputs

    def _predict(self, plan: StepPlan) -> float:
        chunks = [PlannedChunk(chunk.rows, chunk.start - chunk.again) for chunk in plan.chunks]
        self._seconds = seconds = self._times.seconds(chunks)
        return seconds

    # ---------------------------------------------------------------------------------------------------------- gauges

    @property
    def used_blocks(self) -> int:
        """KV blocks with an owner, now."""
        if not self._ends:
            return self.pool.num_used
        done, size = max(0, bisect_left(self._ends, self._clock()) - 1), self.setup.block_size
        more = ((seq.computed + done) // size - (seq.computed - 1) // size for seq in self.scheduler.running)
        return self.pool.num_used + sum(more)

    @property
    def waiting(self) -> int:
        """Requests that are not in the batch."""
        return len(self.scheduler.requests) - len(self.scheduler.running) + len(self._inbox)

    @property
    def preemptions(self) -> int:
        """Preemptions since the start, over all lives."""
        return self._preemptions + self.scheduler.preemptions

    @property
    def lookups(self) -> tuple[int, int]:
        """Tokens of prompts looked for in the prefix cache and found, over all lives."""
        queries, hits = (self.prefix.queries, self.prefix.hits) if self.prefix is not None else (0, 0)
        return self._queries + queries, self._hits + hits


def _emitted(request: Request) -> tuple[int, ...]:
    """What came of a request before."""
    return (request.emitted[0] or ()) if request.emitted else ()
