"""The engine: what runs requests on a loaded model. A step is scheduled, executed and its results are handed out."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from msgspec.structs import replace

from quire.cache.blocks import BlockPool
from quire.cache.prefix import PrefixCache
from quire.core.blame import of_request
from quire.core.config import EngineConfig
from quire.core.errors import BadRequest
from quire.core.plan import StepPlan
from quire.core.pooling import Pooling
from quire.core.request import DecoderStart, Output, Request
from quire.engine.client import EngineInfo
from quire.engine.components.engine_info import engine_info
from quire.engine.components.expert_counts import ExpertCounts
from quire.engine.components.memory_plan import MemoryPlan
from quire.engine.requests import check_heard
from quire.engine.stats import Stats
from quire.features.adapters.edge_adapter_changes import AdapterChanger
from quire.features.adapters.plan_adapters import adapters_of
from quire.features.images.edge_image_checks import check_images
from quire.features.kv_store.edge_store_writer import LeavingRequests, StoreWriter
from quire.features.pooling.edge_pooled_requests import check_kind, classify
from quire.model.build import Model
from quire.ops.backend import Ops
from quire.run.executor import Executor
from quire.run.kv_budget import KVPlan
from quire.run.runner import LaunchedStep, Runner
from quire.sched.scheduler import Scheduler
from quire.speculate.speculator import Drafts, Speculator


class StepQueue:
    """Steps that were launched and whose results are not known, first in first out.

    On a CPU without stages: one step, launched, sampled and popped at once. On a GPU the next one is planned and its
    forward pass sent before the wait for the first; it is sampled when that one is known, because the edits of its
    logits are made from all tokens. With pipeline parallelism the first stage starts steps of other sequences, and of
    further chunks of prompts, before the last stage has the tokens of the first step.
    """

    def __init__(
        self, runner: Runner, scheduler: Scheduler, speculator: Speculator | None, most: int, staged: bool
    ) -> None:
        """`most` steps at one time; `staged`: with pipeline parallelism."""
        self._runner, self._scheduler, self._speculator = runner, scheduler, speculator
        self._most, self._staged = most, staged
        self._steps = deque[LaunchedStep]()

    def __len__(self) -> int:
        return len(self._steps)

    def fill(self) -> float:
        """Launch as many steps as may be in flight, one at least; returns the seconds that drafting took."""
        drafting = 0.0
        while not self._steps or (len(self._steps) < self._most and self._may_go_ahead()):
            if self._speculator is not None and (self._staged or not self._steps):
                begin = time.perf_counter()
                self._speculator.draft()
                drafting += time.perf_counter() - begin
            step = self._runner.forward(self._scheduler.plan())
            if self._steps and not step.plan.chunks:
                break
            if not self._staged and not self._steps:
                self._runner.sample(step)
            self._steps.append(step)
        return drafting

    def pop(self) -> LaunchedStep:
        """Remove the first step and return it, sampled."""
        step = self._steps.popleft()
        return step if step.sampled else self._runner.sample(step)

    def sample_next(self) -> None:
        """Sample the step behind the popped one, whose results the scheduler has; with stages, `pop` does."""
        if self._steps and not self._staged:
            self._runner.sample(self._steps[0])

    def _may_go_ahead(self) -> bool:
        """Whether to launch another step before the first is known; a draft by a model begins with its last token."""
        if any(map(self._runner.blocks_next, self._steps)):
            return False
        drafts = self._speculator
        if drafts is None:
            expects = False
        elif self._staged:
            expects = drafts.proposer.passes and drafts.possible
        else:
            expects = drafts.likely
        return not expects and self._scheduler.may_plan_ahead()


@dataclass(eq=False, kw_only=True)
class Engine:
    """Schedules requests, has `executor` compute their steps, and hands out what comes of them.

    Not thread-safe: one caller drives `step`. `start.start_engine` makes it. `moving`: requests that may leave for
    another engine; `decoder_start`: what the decoder's part of a prompt begins with, behind an encoder. The numbers
    count all steps, but `step_tokens` and `step_seconds`, which are the last one's. `unchecked`: not all of who holds
    blocks was verified since the last step.
    """

    executor: Executor
    memory_plan: MemoryPlan
    runner: Runner
    scheduler: Scheduler
    speculator: Speculator | None
    step_queue: StepQueue
    ahead: bool
    adapting: AdapterChanger
    tiering: StoreWriter | None
    moving: LeavingRequests | None
    experts: ExpertCounts | None
    pooling: Pooling
    decoder_start: DecoderStart | None
    load_seconds: float
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    step_tokens: int = 0
    step_seconds: float = 0.0
    all_seconds: float = 0.0
    unchecked: bool = True

    @property
    def config(self) -> EngineConfig:
        """Options of the engine."""
        return self.executor.config

    @property
    def model(self) -> Model:
        """The loaded model."""
        return self.executor.model

    @property
    def ops(self) -> Ops:
        """What computes."""
        return self.executor.ops

    @property
    def kv(self) -> KVPlan:
        """The plan of the cache: how many blocks, their bytes, groups of layers, the longest sequence."""
        return self.memory_plan.kv

    @property
    def pool(self) -> BlockPool:
        """Who has which block."""
        return self.scheduler.tables.pool

    @property
    def prefix(self) -> PrefixCache | None:
        """Whose prompts begin alike, where that is looked for."""
        return self.scheduler.tables.prefix

    def submit(self, request: Request) -> Output | None:
        """Queue a request; one that can never run ends at once with an error output."""
        try:
            if request.adapter and request.adapter not in self.adapters:
                raise BadRequest(f"adapter: {request.adapter!r} is not loaded", param="adapter")
            check_kind(self.pooling, request, self.model.spec)
            check_images(self.executor.model, self.scheduler.encoding, request)
            check_heard(self.decoder_start, self.model.spec.vocab_size, request)
            self.scheduler.add(self._own(request))
            if self.moving is not None:
                self.moving.add(request.id)
        except BaseException as error:
            return Output(request_id=request.id).fail(of_request(error, "admission"))
        return None

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded LoRA adapters."""
        return self.adapting.names

    def _own(self, request: Request) -> Request:
        """`request` with what this engine adds: a salt of its own, and how a decoder behind an encoder begins.

        The salt keeps apart keys and values in the prefix cache: of an adapter that was unloaded and whose name may be
        another's now, and of short and long sequences, whose keys differ with LongRoPE.
        """
        model, times = self.executor.model, self.adapting.times(request.adapter) if request.adapter else 0
        short = model.short_reach
        salt = f"{times}\0{request.cache_salt}" if times else request.cache_salt
        kind = "short" if request.reach(model.max_model_len) <= short else "long"
        salt = f"{kind}\0{salt}" if short else salt
        return replace(request, cache_salt=salt, decoder_start=self.decoder_start)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request, or its sequence `index`, and free the blocks; unknown ids are ignored."""
        self.scheduler.abort(request_id, index)

    def reset_prefix_cache(self) -> None:
        """Later requests find nothing of earlier ones. Those that run keep what they have, and their answers."""
        if self.tiering is None:
            self.scheduler.tables.forget_all()
        else:
            self.tiering.forget()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self.scheduler.has_work

    def step(self) -> list[Output]:
        """One iteration: schedule, execute, update."""
        if not self.scheduler.running:
            self._wait()
        started = time.perf_counter()
        drafting = self.step_queue.fill()
        step = self.step_queue.pop()
        plan, results = step.plan, self.runner.results(step)
        if self.speculator is not None:
            spent = time.perf_counter() - started - drafting
            self.speculator.learn(plan, results, spent, fresh=not len(self.step_queue))
        outputs = self.scheduler.commit(plan, results)
        if self.executor.model.classifier:
            classify(self.executor.model.classifier, outputs)
        self.step_queue.sample_next()
        self.unchecked = True
        self._count(plan, outputs, time.perf_counter() - started)
        if not plan.encodes:  # which say nothing of what rows take
            self.scheduler.pace.learn(plan, self.step_seconds)
            if self.tiering is not None:
                self.tiering.learn(plan, self.step_seconds)
        return outputs

    def _count(self, plan: StepPlan, outputs: list[Output], seconds: float) -> None:
        self.steps += 1
        self.step_tokens, self.step_seconds = 0, seconds
        self.all_seconds += seconds
        for chunk in plan.chunks:
            self.step_tokens += chunk.rows
            if chunk.start < chunk.seq.prompt_len:
                self.prompt_tokens += chunk.seq.prompt_tokens(chunk.start, chunk.start + chunk.count)
        for output in outputs:
            self.generation_tokens += len(output.tokens)

    def _wait(self) -> None:
        """Where nothing else is to be done than to wait for blocks of a store, or for a grammar."""
        scheduler = self.scheduler
        if len(scheduler.waiting):
            return
        if len(scheduler.recall) and self.tiering is not None:
            self.tiering.tiers.wait(0.02)
        elif len(scheduler.readying):
            scheduler.readying.wait(0.02)

    def portable(self) -> tuple[str, ...]:
        """Requests that another engine can go on with since the last call, without computing their prompts."""
        return () if self.moving is None else self.moving.take()

    def close(self) -> None:
        """Keep what a store is to have, and end the other ranks, if there are any."""
        if self.tiering is not None:
            self.tiering.close()
        if self.experts is not None:
            self.experts.keep(now=True)
        self.executor.close()

    def check(self, part: bool = False) -> None:
        """Verify who holds blocks, or the next `part` of what is `unchecked`, which takes less than a millisecond: call
        it when idle. AssertionError names what is wrong. `EngineFailure` when another rank has ended.
        """
        self.executor.check()
        if self.experts is not None:
            self.experts.keep()
        pool, states = self.pool, self.scheduler.tables.states
        if not part:
            pool.check()
        elif self.unchecked:
            self.unchecked = pool.check_more()
        assert self.scheduler.has_work or not pool.num_used, f"{pool.num_used} blocks are held by nobody"
        if states is not None and not part:
            states.check()
            assert self.scheduler.has_work or not states.held, f"{states.held} states are held by nobody"

    def waste(self) -> float:
        """Share of the reserved KV slots that hold no token."""
        kv = self.memory_plan.kv
        size, filled, width, slack = kv.sizes.block_size, kv.groups.filled, kv.groups.width, 0
        for seq in self.scheduler.running:
            for table, slid, layers in zip(seq.kv.blocks, seq.kv.slid, filled, strict=True):
                slack += (len(table) * size - seq.computed) * layers + (len(table) - slid) * size * (width - layers)
        return slack / max(1, self.pool.num_used * size * width)

    def stats(self) -> Stats:
        """Gauges and totals now."""
        drafts, encoding = Drafts() if self.speculator is None else self.speculator.totals, self.scheduler.encoding
        model, pool, prefix = self.executor.model, self.pool, self.prefix
        loras, staged = model.adapters is not None, model.place.topology.pipeline > 1
        return Stats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            used_blocks=pool.num_used,
            total_blocks=pool.num_blocks,
            cached_blocks=pool.num_cached,
            waste=self.waste(),
            steps=self.steps,
            step_tokens=self.step_tokens,
            step_seconds=self.step_seconds,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            preemptions=self.scheduler.preemptions,
            prefix_queries=prefix.queries if prefix else 0,
            prefix_hits=prefix.hits if prefix else 0,
            image_queries=0 if encoding is None else encoding.queries,
            image_hits=0 if encoding is None else encoding.hits,
            numeric_errors=self.runner.numeric_errors,
            drafts=drafts.drafts,
            draft_tokens=drafts.tokens,
            accepted_tokens=drafts.accepted,
            accepted_per_pos=tuple(drafts.accepted_per_pos),
            kv_store=None if self.tiering is None else self.tiering.store.counts(),
            **({} if self.experts is None else self.experts.shown()),
            running_adapters=adapters_of(self.scheduler.running) if loras else (),
            waiting_adapters=self.scheduler.room.adapters.names if loras else (),
            bubbles=self.executor.bubbles(self.all_seconds) if staged else (),
        )

    def info(self) -> EngineInfo:
        """Facts the edge needs."""
        places = self.memory_plan.kv, self.memory_plan.bytes_per_token
        return engine_info(
            self.config, self.model, self.ops, places, self.load_seconds, self.adapters, self.decoder_start,
            self.scheduler.encoding,
        )  # fmt: skip
