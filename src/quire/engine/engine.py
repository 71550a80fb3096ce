"""The engine: a loaded model and what runs it. A step is scheduled, executed and its results are handed out."""

from __future__ import annotations

import gc
import time

from msgspec.structs import replace

from quire.cache.blocks import BlockPool
from quire.cache.prefix import PrefixCache
from quire.cache.tables import BlockTables
from quire.core.blame import of_request
from quire.core.config import EngineConfig
from quire.core.errors import BadRequest, ConfigError
from quire.core.exclusions.table import check_known
from quire.core.progress import LoadProgress
from quire.core.request import Opening, Output, Request
from quire.engine.client import EngineInfo
from quire.engine.failures import told_plainly
from quire.engine.loop.account import Account
from quire.engine.loop.adapting import Adapting
from quire.engine.loop.experts import expert_counts
from quire.engine.loop.facts import engine_info, pooling_of
from quire.engine.loop.guiding import Guiding
from quire.engine.loop.pictures import check_pictures, encoding_of, with_sight
from quire.engine.loop.planning import Plan, make_plan, same_weights
from quire.engine.loop.pooled import check_kind, classify
from quire.engine.loop.portable import Portable
from quire.engine.loop.tiering import tiering_of
from quire.engine.loop.under_way import UnderWay
from quire.engine.stats import Stats
from quire.model.build import Model, check_start, load_model
from quire.model.offload.shards import Shards
from quire.model.timing import with_stages
from quire.ops.backend import Ops
from quire.ops.select import select
from quire.run.caches import kept_layers
from quire.run.ranks import ended_on_error, first_place, lead, of_a_rank
from quire.run.runner import Runner
from quire.run.tune import tune
from quire.run.warm import warm_up
from quire.sched.growth import adapters_of
from quire.sched.scheduler import Scheduler
from quire.sched.shares import Portions
from quire.speculate.load import Drafting, load_drafting
from quire.speculate.speculator import Drafts, Speculator


class Engine:
    """A loaded model and everything that runs it. Not thread-safe: one caller drives `step`."""

    def __init__(
        self, config: EngineConfig, progress: LoadProgress | None = None, shards: Shards | None = None
    ) -> None:
        """`shards`: memory that replicas keep weights in together."""
        config.validate()
        started, self._since = time.monotonic(), time.time()
        self.config = config = of_a_rank(config)
        self.ops: Ops = select(config.device)
        if config.parallel.ranks > 1:  # before others are started, which takes seconds
            with told_plainly(config.model.model):
                check_start(config, self.ops)
        self.config = config = with_stages(config, self.ops)
        self.ranks = lead(config)
        with ended_on_error(self.ranks), told_plainly(config.model.model):
            loaded = load_model(config, self.ops, progress, first_place(self.ranks), shards)
            self.model: Model = with_sight(config, loaded)
            self.drafting = load_drafting(config, self.model, self.ops, progress, first_place(self.ranks))
            self._arrange()
        self.load_seconds = time.monotonic() - started
        self.pooling = pooling_of(config, self.model)
        told = None if self.ranks is None else self.ranks.adapter
        known = None if self.tiering is None else self.tiering.know
        self.adapting = Adapting(self.model.adapters, self._users, told, known)

    def _arrange(self) -> None:
        """Decide on the cache and on the bounds of steps, and make everything that depends on them."""
        config = self.config
        plan = make_plan(config, self.model, self.ops, self.beside, self.ranks)
        if self.ranks is not None:
            alone = self.drafting is not None and self.drafting.alone
            self.ranks.allocate(plan.kv, plan.limits, alone, kept_layers((self.model,))[0].values())
        self.kv, self.kv_bytes_per_token, self.max_model_len = plan.kv, plan.bytes_per_token, plan.kv.max_model_len
        self._allocate(plan)
        self.ahead = self.ops.queues and plan.limits.async_scheduling is not False
        most, staged = max(1 + self.ahead, config.parallel.steps_under_way), config.parallel.pipeline_parallel_size > 1
        self.under_way = UnderWay(self.runner, self.scheduler, self.speculator, most, staged)
        self.steps = self.prompt_tokens = self.generation_tokens = 0
        self.step_tokens, self.step_seconds, self.all_seconds = 0, 0.0, 0.0

    def rearrange(self, config: EngineConfig) -> None:
        """Go on, idle, under other options of the cache, of steps and of look-ups that draft: the weights stay.

        `ConfigError` where weights would be others (`same_weights`), or while anything runs; where a start would refuse
        the options, and then it is to be closed.
        """
        config.validate()
        check_known(config.features, self.model.known)
        if not same_weights(self.config, config) or self.has_work:
            raise ConfigError("rearrange: the engine runs requests, or these options need other weights; start another")
        self.config = config
        self.drafting = load_drafting(config, self.model, self.ops, None)
        del self.under_way, self.runner, self.scheduler, self.guiding, self.speculator, self.pool, self.prefix
        del self.account
        gc.collect()  # the old cache goes before the new one is sized
        self._arrange()

    def _allocate(self, plan: Plan) -> None:
        """Take the memory that `plan` says, and run what the first step would otherwise wait for.

        With an encoder no prefix is shared: every token of a prompt changes all keys.
        """
        size, encoder = self.config.cache.block_size, self.model.encoder
        shares = self.config.cache.enable_prefix_caching and encoder is None
        self.pool = BlockPool(plan.kv.blocks, plan.kv.sizes.holders)
        models = self.model, *self.beside
        self.tiering = tiering = tiering_of(self.config, models, self.ops, plan.kv, self._since, self.ranks)
        known = () if tiering is None else (tiering.secret, tiering.identity)
        self.prefix = PrefixCache(self.pool, size, *known) if shares else None
        tables = BlockTables(self.pool, self.prefix, plan.kv.sizes, None if tiering is None else tiering.tiers)
        self.opening = None if encoder is None else Opening(size, self.model.decoder_start)
        parallel = self.config.parallel
        portions = Portions(parallel.pipeline_parallel_size, parallel.steps_under_way)
        encoding = encoding_of(plan.limits, self.model)
        self.scheduler = Scheduler(plan.limits, tables, self.max_model_len, portions, encoding)
        self.guiding = Guiding(self.config.model, str(self.model.folder), self.model.spec.vocab_size, self.scheduler)
        taps = None if self.drafting is None else self.drafting.taps
        self.runner = Runner(self.model, self.ops, plan.kv, plan.limits, plan.capture, self.beside, taps, self.ranks)
        if tiering is not None:
            tiering.attach(self.scheduler, self.runner.caches)
        store = None if tiering is None or not parallel.prefill_replicas else tiering.tiers.store
        self._portable = None if store is None else Portable(self.scheduler, store)
        warm_up(self.runner.step, self._trees)
        alone = self.ranks is None and not self.config.offload.from_file  # steps whose time is that of their weights
        tune(self.runner.step, self.config, self.model.weight_bytes if alone else 0)
        self.speculator = None if self.drafting is None else self._speculator(self.drafting, plan)
        self.experts = expert_counts(self.model.decoder, self.config.parallel, first_place(self.ranks).experts)
        self.account = Account(self.pool, self.scheduler, self.ranks, self.experts)

    @property
    def beside(self) -> tuple[Model, ...]:
        """Models that keep keys and values in the target's blocks."""
        return () if self.drafting is None else self.drafting.beside

    @property
    def _trees(self) -> bool:
        return self.drafting is not None and self.drafting.asked.tree is not None

    def _speculator(self, drafting: Drafting, plan: Plan) -> Speculator:
        caches = self.runner.caches
        step = drafting.step((self.ops, plan.kv, plan.limits), caches, plan.capture, self.ranks)
        proposer = drafting.proposer(step, self.runner.step)
        return Speculator(drafting.asked, proposer, self.scheduler, caches, self.model.spec.vocab_size)

    def submit(self, request: Request) -> Output | None:
        """Queue a request; one that can never run ends at once with an error output."""
        try:
            if request.adapter and request.adapter not in self.adapters:
                raise BadRequest(f"adapter: {request.adapter!r} is not loaded", param="adapter")
            check_kind(self.pooling, request)
            check_pictures(self.model, self.scheduler.encoding, request)
            self.scheduler.add(self._own(request))
            if self._portable is not None:
                self._portable.add(request.id)
        except BaseException as error:
            return Output(request_id=request.id).fail(of_request(error, "admission"))
        return None

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded LoRA adapters."""
        return self.adapting.names

    def _users(self, adapter: str) -> int:
        """Requests that use it."""
        return sum(first.request.adapter == adapter for first, *_ in self.scheduler.requests.values())

    def _own(self, request: Request) -> Request:
        """`request` as this engine runs it.

        Keys and values are not found of an adapter that was unloaded and whose name may be another's now, nor by a long
        sequence those of short ones, whose ropes turn otherwise.
        """
        times, short = self.adapting.times(request.adapter), self.model.short_reach
        salt = f"{times}\0{request.cache_salt}" if times else request.cache_salt
        kind = "short" if request.reach(self.model.max_model_len) <= short else "long"
        salt = f"{kind}\0{salt}" if short else salt
        return replace(request, cache_salt=salt, opening=self.opening)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request, or its sequence `index`, and free the blocks; unknown ids are ignored."""
        self.scheduler.abort(request_id, index)

    def reset_prefix_cache(self) -> None:
        """Later requests find nothing of earlier ones. Those that run keep what they have, and their answers."""
        if self.tiering is None:
            self.pool.forget_all()
        else:
            self.tiering.forget()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self.scheduler.has_work

    def step(self) -> list[Output]:
        """One iteration: schedule, execute, update."""
        if self.tiering is not None:
            self.tiering.wait()
        self.guiding.wait()
        started = time.perf_counter()
        drafting = self.under_way.launch()
        step = self.under_way.take()
        plan, results = step.plan, self.runner.results(step)
        if self.speculator is not None:
            spent = time.perf_counter() - started - drafting
            self.speculator.learn(plan, results, spent, fresh=not len(self.under_way))
        outputs = self.scheduler.commit(plan, results)
        classify(self.model.classifier, outputs)
        self.under_way.committed()
        self.account.unchecked = True
        self.steps += 1
        self.step_tokens = plan.num_tokens
        made = sum(len(o.tokens) for o in outputs)
        self.generation_tokens += made
        self.prompt_tokens += sum(c.seq.prompt_tokens(c.start, c.start + c.count) for c in plan.chunks)
        self.step_seconds = time.perf_counter() - started
        self.all_seconds += self.step_seconds
        if not plan.encodes:  # which say nothing of what rows take
            self.scheduler.pace.learn(plan, self.step_seconds)
            if self.tiering is not None:
                self.tiering.learn(plan, self.step_seconds)
        return outputs

    def portable(self) -> tuple[str, ...]:
        """Requests that another engine can go on with since the last call, without computing their prompts."""
        return () if self._portable is None else self._portable.take()

    def close(self) -> None:
        """Keep what a store is to have, and end the other ranks, if there are any."""
        if self.tiering is not None:
            self.tiering.close()
        if self.experts is not None:
            self.experts.keep(now=True)
        if self.ranks is not None:
            self.ranks.close()

    def check(self, part: bool = False) -> None:
        """Verify the account of blocks, or the next `part` of it: call it when idle. AssertionError if it is wrong.

        `EngineFailure` when another rank has ended.
        """
        self.account.check(part)

    def waste(self) -> float:
        """Share of the reserved KV slots that hold no token."""
        return self.kv.waste(self.scheduler.running, self.pool.num_used)

    def stats(self) -> Stats:
        """Gauges and totals now."""
        drafts, encoding = Drafts() if self.speculator is None else self.speculator.totals, self.scheduler.encoding
        loras = self.model.adapters is not None
        return Stats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            used_blocks=self.pool.num_used,
            total_blocks=self.pool.num_blocks,
            cached_blocks=self.pool.num_cached,
            waste=self.waste(),
            steps=self.steps,
            step_tokens=self.step_tokens,
            step_seconds=self.step_seconds,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            preemptions=self.scheduler.preemptions,
            prefix_queries=self.prefix.queries if self.prefix else 0,
            prefix_hits=self.prefix.hits if self.prefix else 0,
            picture_queries=0 if encoding is None else encoding.queries,
            picture_hits=0 if encoding is None else encoding.hits,
            numeric_errors=self.runner.numeric_errors,
            drafts=drafts.drafts,
            draft_tokens=drafts.tokens,
            accepted_tokens=drafts.accepted,
            accepted_per_pos=tuple(drafts.accepted_per_pos),
            kv_store=None if self.tiering is None else self.tiering.counts(),
            **({} if self.experts is None else self.experts.shown()),
            running_adapters=adapters_of(self.scheduler.running) if loras else (),
            waiting_adapters=tuple(sorted(self.scheduler.room.adapters)) if loras else (),
            bubbles=() if self.ranks is None else self.ranks.bubbles(self.all_seconds),
        )

    def info(self) -> EngineInfo:
        """Facts the edge needs."""
        places = self.kv, self.kv_bytes_per_token
        return engine_info(
            self.config, self.model, self.ops, places, self.load_seconds, self.adapters, self.opening,
            self.scheduler.encoding,
        )  # fmt: skip
