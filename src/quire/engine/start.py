"""The one start of an engine, in this process or another: models are loaded, memory is planned, and parts are made.
See docs/design/steps.md."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from quire.cache.blocks import BlockPool
from quire.cache.prefix import PrefixCache
from quire.cache.states import StateSlots
from quire.cache.tables import BlockTables
from quire.core.config import EngineConfig, SchedulerConfig
from quire.core.errors import ConfigError, ModelError
from quire.core.exclusions.table import check_known
from quire.core.files import LoadProgress
from quire.core.request import DecoderStart
from quire.engine.components.expert_counts import expert_counts
from quire.engine.components.memory_plan import make_memory_plan, same_weights
from quire.engine.engine import Engine, StepQueue
from quire.features.adapters.edge_adapter_changes import AdapterChanger
from quire.features.images.plan_images import EncoderLimits, EncoderScheduler
from quire.features.kv_store.edge_block_store import BlockStore
from quire.features.kv_store.edge_store_writer import LeavingRequests, StoreWriter
from quire.features.pooling.edge_pooled_requests import pooling_of
from quire.features.structured_output.edge_grammar_compiler import GrammarCompiler
from quire.model.build import Model, check_start, load_model
from quire.model.known import known_of_device
from quire.model.layer_timing import with_stages
from quire.model.offload.shared_host import Shards
from quire.model.own_drafts import own_drafts, with_own_drafts
from quire.ops.backend import open_backend
from quire.parallel.rank_place import ALONE
from quire.parallel.weight_shares import RemoteShare
from quire.parallel.wire import read_secret
from quire.run.executor import Allocated, Executor, LocalExecutor
from quire.run.kv_budget import KVPlan
from quire.run.multi_rank import MultiRankExecutor
from quire.run.rank_group import ended_on_error, lead, of_a_rank
from quire.run.runner import Runner
from quire.sched.scheduler import Scheduler
from quire.sched.token_budget import MicroBatches
from quire.speculate.load_drafts import Drafting, load_drafting
from quire.speculate.speculator import Speculator

log = logging.getLogger(__name__)
NO_MEMORY = "can't allocate memory"
"""In the message of the RuntimeError that torch raises instead of MemoryError."""


@dataclass(frozen=True)
class LoadedModels:
    """What computes with loaded models. `since`: when the start began (seconds of the epoch, and of the clock)."""

    executor: Executor
    drafting: Drafting | None
    since: tuple[float, float]


def start_engine(config: EngineConfig, progress: LoadProgress | None = None, shards: Shards | None = None) -> Engine:
    """The engine that `config` says, with all other ranks; `shards`: memory that replicas keep weights in together.

    `ConfigError` or `ModelError` for what cannot be, with the reason; then nothing of it is left.
    """
    config.validate()
    since = time.time(), time.monotonic()
    config = of_a_rank(config)
    ops = open_backend(config.device)
    with _told_plainly(config.model.model):
        config, why = own_drafts(config, device=known_of_device(config, ops.name, ops.chosen))
        if why:
            log.info("the model's own layer for drafts is left out: %s", why)
        if config.parallel.ranks > 1:  # before others are started, which takes seconds
            check_start(config, ops)
    config = with_stages(config, ops)
    ranks = lead(config)
    with ended_on_error(ranks), _told_plainly(config.model.model):
        place = ALONE if ranks is None else ranks.place
        model = load_model(config, ops, progress, place, shards)
        if config.model.language_model_only:
            model = replace(model, vision=None)
        drafting = load_drafting(config, model, ops, progress, place)
        own = LocalExecutor(config, model, ops, drafting)
        return build_engine(LoadedModels(own if ranks is None else MultiRankExecutor(own, ranks), drafting, since))


def with_options(executor: Executor, config: EngineConfig) -> LoadedModels:
    """Make an engine of the same weights under other options of the cache, of steps and of look-ups that draft, yet
    without a cache.

    `ConfigError` where weights would be others (`same_weights`), or a start would refuse the options.
    """
    config.validate()
    config = with_own_drafts(config)
    model, ops, since = executor.model, executor.ops, (time.time(), time.monotonic())
    check_known(config.features, model.known)
    if not same_weights(executor.config, config):
        raise ConfigError("rearrange: these options need other weights; start another engine")
    drafting = load_drafting(config, model, ops, None)
    return LoadedModels(LocalExecutor(config, model, ops, drafting), drafting, since)


def build_engine(loaded: LoadedModels) -> Engine:
    """The engine of `loaded`: decides on the cache and on the bounds of steps, and allocates what depends on them."""
    executor, drafting = loaded.executor, loaded.drafting
    config, model, parallel = executor.config, executor.model, executor.config.parallel
    pooling, plan = pooling_of(config, model), make_memory_plan(executor)
    allocated = executor.allocate(plan.kv, plan.limits)
    stored = allocated.blocks.stored
    store = None if stored is None else BlockStore(executor, plan.kv, stored.sizes, loaded.since[0])
    guiding = GrammarCompiler(config.model, str(model.folder), model.spec.vocab_size)
    scheduler = Scheduler(
        plan.limits,
        _tables(executor, plan.kv, store),
        plan.kv.max_model_len,
        MicroBatches(parallel.pipeline_parallel_size, parallel.steps_under_way),
        _encoding(plan.limits, model),
        guiding.begin,
    )
    runner = Runner(allocated, None if store is None else store.keep)
    speculator = None if drafting is None else _speculator(drafting, allocated, scheduler, runner)
    ahead = executor.ops.queues and plan.limits.async_scheduling is not False
    most, staged = max(1 + ahead, parallel.steps_under_way), parallel.pipeline_parallel_size > 1
    return Engine(
        executor=executor,
        memory_plan=plan,
        runner=runner,
        scheduler=scheduler,
        speculator=speculator,
        step_queue=StepQueue(runner, scheduler, speculator, most, staged),
        ahead=ahead,
        adapting=AdapterChanger(executor, scheduler, None if store is None else store.know),
        tiering=None if store is None else StoreWriter(store, scheduler, runner),
        moving=LeavingRequests(scheduler, store.tiers.store)
        if store is not None and parallel.prefill_replicas
        else None,
        experts=expert_counts(model.decoder, parallel, model.place.experts),
        pooling=pooling,
        decoder_start=_decoder_start(config, model),
        load_seconds=time.monotonic() - loaded.since[1],
    )


def _decoder_start(config: EngineConfig, model: Model) -> DecoderStart | None:
    """How sequences of a model with an encoder begin; None without one."""
    if model.encoder is None:
        return None
    stack, positions = model.spec.encoder, model.spec.max_position if model.spec.encoder.rows else 0
    return DecoderStart(config.cache.block_size, model.decoder_start, positions, stack.rows, stack.bins)


def _tables(executor: Executor, kv: KVPlan, store: BlockStore | None) -> BlockTables:
    """Block tables of the pool of all blocks. With an encoder no prefix is shared: every token of a prompt changes all
    keys."""
    cache, tiers = executor.config.cache, None if store is None else store.tiers
    pool = BlockPool(kv.blocks, kv.sizes.holders, watcher=tiers)
    secret, identity = (b"", str) if store is None else (store.secret, store.identity)
    shares = cache.enable_prefix_caching and not executor.model.reads_whole
    states = None
    if kv.states.slots:
        most, interval = executor.config.scheduler.max_num_seqs, kv.states.interval if shares else 0
        states = StateSlots(kv.states.slots, cache.block_size, interval, most, tiers)
    prefix = None
    if shares:
        prefix = PrefixCache(pool, cache.block_size, secret, identity, None if states is None else states.pool)
    return BlockTables(pool, prefix, kv.sizes, tiers, states)


def _speculator(drafting: Drafting, allocated: Allocated, scheduler: Scheduler, runner: Runner) -> Speculator:
    proposer = drafting.proposer(allocated.drafts, allocated.step, runner.features)
    return Speculator(drafting.asked, proposer, scheduler, runner.move_blocks, allocated.step.model.spec.vocab_size)


def _encoding(limits: SchedulerConfig, model: Model) -> EncoderScheduler | None:
    """Who plans what is encoded, within the limits of steps; None where the model takes no images."""
    if model.vision is None:
        return None
    mutual = model.spec.sight.mutual
    return EncoderScheduler(
        EncoderLimits(*limits.encoder_rows, mutual, limits.max_num_batched_tokens, limits.max_num_seqs)
    )


@contextmanager
def _told_plainly(model: str) -> Iterator[None]:
    """`ModelError` for a file that cannot be opened, read or mapped, `ConfigError` where memory runs out."""
    try:
        yield
    except OSError as error:
        what = error.filename or f"a file of {model or 'the embedded model'}"
        raise ModelError(f"{what} cannot be read: {error.strerror or error}") from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and NO_MEMORY not in str(error):
            raise
        raise ConfigError(
            f"memory ran out while {model or 'the embedded model'} was loaded; use a smaller model, quantize it "
            "(--quantization int4), or lower --kv-cache-memory-bytes"
        ) from error


def shards_of(config: EngineConfig, file: int) -> Shards:
    """Where an engine finds the weights that replicas keep together (`--fully-shard`).

    `file`: the descriptor of this host's share; the others are at `config.hosts`, where there are any.
    """
    if not config.hosts:
        return Shards(file)
    cluster = config.cluster
    secret, own = read_secret(Path(cluster.cluster_secret_file or "")), cluster.node_rank
    hosts = (None if node == own else RemoteShare(address, secret) for node, address in enumerate(config.hosts))
    return Shards(file, own, tuple(hosts))
