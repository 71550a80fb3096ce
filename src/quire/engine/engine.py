"""The engine: schedule, execute, update - thirty lines around the scheduler and the runner."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from quire.cache.blocks import BlockPool
from quire.cache.prefix import PrefixCache
from quire.cache.tables import BlockTables
from quire.core.config import EngineConfig, SchedulerConfig
from quire.core.errors import BadRequest, ConfigError, QuireError
from quire.core.plan import ChunkResult, StepPlan
from quire.core.progress import LoadProgress
from quire.core.request import Output, Request
from quire.core.sequence import Opening
from quire.engine.budget import KVPlan, gpu_cache_bytes, plan_kv, shape_kv
from quire.engine.client import AdapterChanged, ChangeAdapter, EngineInfo, Stats
from quire.engine.runner import Runner
from quire.engine.shapes import graph_bytes
from quire.engine.tune import tune
from quire.engine.warm import warm_device
from quire.model.build import Model, load_model
from quire.ops.backend import Ops, select
from quire.sched.scheduler import Scheduler

USUAL_SHARES = (0.9, 0.92)
"""Defaults of quire and vLLM: given where there is no GPU, they ask for nothing."""


class Engine:
    """A loaded model and everything that runs it. Not thread-safe: one caller drives `step`."""

    def __init__(self, config: EngineConfig, progress: LoadProgress | None = None) -> None:
        config.validate()
        started = time.monotonic()
        self.config = config
        self.ops: Ops = select(config.device)
        self.model: Model = load_model(config, self.ops, progress)
        spec = self.model.spec
        layouts = {i: self.model.layouts[i] for i in spec.own_layers}
        self.kv_bytes_per_token = sum(layout.bytes_per_token for layout in layouts.values())
        shape = shape_kv(config, spec.own_windows, layouts, self.model.max_model_len)
        self.kv = plan_kv(config, shape, self._cache_bytes(shape))
        self.max_model_len = self.kv.max_model_len
        self.pool = BlockPool(self.kv.blocks)
        size, encoder = config.cache.block_size, self.model.encoder
        shares = config.cache.enable_prefix_caching and encoder is None
        self.prefix = PrefixCache(self.pool, size) if shares else None
        limits = self._limits(self.max_model_len)
        self._check_limits(limits)
        tables = BlockTables(self.pool, self.prefix, self.kv.sizes)
        opening = None if encoder is None else Opening(size, self.model.decoder_start)
        self.scheduler = Scheduler(limits, tables, self.max_model_len, opening)
        self.runner = Runner(self.model, self.ops, self.kv, limits, capture=not config.device.enforce_eager)
        self.runner.warm_up()
        if self.ops.gpu is not None and not self.ops.gpu.interpreted:
            warm_device(self.runner)
        tune(self.runner, config, self.model.weight_bytes)
        self.ahead = self.ops.gpu is not None and limits.async_scheduling is not False
        self._launched: tuple[StepPlan, Callable[[], list[ChunkResult]]] | None = None
        self.load_seconds = time.monotonic() - started
        self._unloads: dict[str, int] = {}
        self.steps = self.prompt_tokens = self.generation_tokens = 0
        self.step_tokens, self.step_seconds = 0, 0.0

    def _check_limits(self, limits: SchedulerConfig) -> None:
        """Limits of a step that the model or the device makes impossible."""
        if not limits.enable_chunked_prefill and limits.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"without chunked prefill --max-num-batched-tokens ({limits.max_num_batched_tokens}) must be at least "
                f"--max-model-len ({self.max_model_len})",
                param="max_num_batched_tokens",
            )
        if limits.async_scheduling and self.ops.gpu is None:
            raise ConfigError(
                f"--async-scheduling needs a GPU: on the {self.ops.name} backend the host itself computes each step, "
                "and nothing is left to overlap with it; leave the option out",
                param="async_scheduling",
            )

    def _limits(self, length: int) -> SchedulerConfig:
        """Those of steps. An encoder reads all of a prompt at once: none is cut, and a step has room for `length`.

        For the same reason the beginning of a prompt says nothing of another's keys and values: no prefix is shared.
        """
        limits = self.config.scheduler
        if self.model.encoder is None:
            return limits
        room = max(limits.max_num_batched_tokens, length)
        return replace(limits, enable_chunked_prefill=False, max_num_batched_tokens=room)

    def _cache_bytes(self, shape: KVPlan) -> int | None:
        """What a GPU has left for the KV cache; None on the host."""
        cache = self.config.cache
        if self.ops.gpu is None and cache.gpu_memory_utilization not in USUAL_SHARES:
            raise ConfigError(
                f"--gpu-memory-utilization {cache.gpu_memory_utilization:g}: no GPU is in use (backend "
                f"{self.ops.name}); size the KV cache with --kv-cache-memory-bytes",
                param="gpu_memory_utilization",
            )
        if self.ops.gpu is None or cache.kv_cache_memory_bytes or cache.num_blocks:
            return None
        capture, runtime = not self.config.device.enforce_eager, self.ops.gpu.runtime
        runner = Runner(self.model, self.ops, shape, self._limits(shape.max_model_len), capture)
        kept = graph_bytes(runner.graph_sizes, self.model.spec.vocab_size)
        if runner.graph_sizes:  # their memory is a pool of its own, beside that of the largest step
            kept += runtime.peak(lambda: runner.profile(runner.graph_sizes[-1]))
        return gpu_cache_bytes(runtime, cache.gpu_memory_utilization, runner.profile) - kept

    def submit(self, request: Request) -> Output | None:
        """Queue a request; one that can never run ends at once with an error output."""
        try:
            if request.adapter and request.adapter not in self.adapters:
                raise BadRequest(f"adapter: {request.adapter!r} is not loaded", param="adapter")
            self.scheduler.add(self._apart(request))
        except QuireError as error:
            return Output(request_id=request.id, finish_reason="error", error=error.message)
        return None

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded LoRA adapters."""
        return tuple(self.model.adapters.names) if self.model.adapters is not None else ()

    def load_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter between steps; `ConfigError` or `ModelError` when it cannot be."""
        if self.model.adapters is None:
            raise ConfigError("there is no room for LoRA adapters: set enable_lora", param="enable_lora")
        self.model.adapters.load(name, Path(folder).expanduser())

    def change_adapter(self, change: ChangeAdapter) -> AdapterChanged:
        """Load or unload a LoRA adapter between steps; one that a request still uses stays."""
        error = ""
        try:
            if change.folder:
                self.load_adapter(change.name, change.folder)
            else:
                self._unload_adapter(change.name)
        except QuireError as failure:
            error = failure.message
        except Exception as failure:  # whatever lies in that folder, the requests of others go on
            error = f"{change.folder}: cannot be read as an adapter: {type(failure).__name__}: {failure}"
        return AdapterChanged(change.name, self.adapters, error)

    def _unload_adapter(self, name: str) -> None:
        if self.model.adapters is None:
            raise ConfigError("there are no LoRA adapters: set enable_lora", param="enable_lora")
        using = sum(first.request.adapter == name for first, *_ in self.scheduler.requests.values())
        if using:
            raise ConfigError(f"adapter {name!r} is used by {using} requests; try again when they have ended")
        self.model.adapters.unload(name)
        self._unloads[name] = self._unloads.get(name, 0) + 1

    def _apart(self, request: Request) -> Request:
        """A name that was unloaded may be another adapter now: its old keys and values must not be found."""
        times = self._unloads.get(request.adapter, 0)
        return replace(request, cache_salt=f"{times}\0{request.cache_salt}") if times else request

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks; unknown ids are ignored."""
        self.scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self.scheduler.has_work

    def step(self) -> list[Output]:
        """One iteration: schedule, execute, update. On a GPU the next one is scheduled and sent before the wait."""
        started = time.perf_counter()
        plan, results = self._launched or self._launch()
        self._launched = self._launch() if self.ahead and self.scheduler.may_plan_ahead() else None
        outputs = self.scheduler.commit(plan, results())
        self.steps += 1
        self.step_tokens = plan.num_tokens
        made = sum(len(o.tokens) for o in outputs)
        self.generation_tokens += made
        self.prompt_tokens += sum(c.seq.prompt_tokens(c.start, c.start + c.count) for c in plan.chunks)
        self.step_seconds = time.perf_counter() - started
        return outputs

    def check(self) -> None:
        """Verify the account of blocks; it takes milliseconds, so call it when idle. AssertionError if it is wrong."""
        self.pool.check()
        assert self.has_work or not self.pool.num_used, f"{self.pool.num_used} blocks are held by nobody"

    def _launch(self) -> tuple[StepPlan, Callable[[], list[ChunkResult]]]:
        plan = self.scheduler.plan()
        return plan, self.runner.launch(plan)

    def waste(self) -> float:
        """Share of the reserved KV slots that hold no token."""
        size, groups = self.config.cache.block_size, self.kv.groups
        slack = 0
        for seq in self.scheduler.running:
            for table, slid, layers in zip(seq.blocks, seq.slid, groups.layers, strict=True):
                slack += (len(table) * size - seq.computed) * len(layers)
                slack += (len(table) - slid) * size * (groups.width - len(layers))
        return slack / max(1, self.pool.num_used * size * groups.width)

    def stats(self) -> Stats:
        """Gauges and totals now."""
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
            numeric_errors=self.runner.numeric_errors,
        )

    def info(self) -> EngineInfo:
        """Facts the edge needs."""
        model, config = self.model, self.config
        return EngineInfo(
            model=model.name,
            served_name=next(iter(config.model.served_model_name), model.name),
            folder=str(model.folder),
            vocab_size=model.spec.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=model.eos_token_ids,
            block_size=config.cache.block_size,
            num_blocks=self.pool.num_blocks,
            kv_bytes_per_token=self.kv_bytes_per_token,
            weight_bytes=model.weight_bytes,
            max_num_queued_reqs=config.scheduler.max_num_queued_reqs,
            load_seconds=self.load_seconds,
            backend=self.ops.name,
            isa=self.ops.isa,
            threads=self.ops.threads,
            dtype=model.dtype,
            quantization=config.model.quantization or "none",
            kv_cache_dtype=str(model.layouts[0].dtype).removeprefix("torch."),
            generation_defaults=model.generation_defaults,
            adapters=self.adapters,
            encoder_decoder=model.encoder is not None,
            implementations=dict(self.ops.chosen),
        )
