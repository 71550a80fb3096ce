"""Prometheus metrics of one engine: vLLM's names, so that existing dashboards work, and quire's own under `quire:`.

TTFT, ITL, TPOT and E2E are taken where the server receives tokens, counted from the moment the request was received:
TTFT = first token - received, ITL = gap between consecutive tokens (tokens of one step have gap 0), E2E = last token -
received, TPOT = (E2E - TTFT) / (tokens - 1). Each of a request's `n` sequences is observed by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from quire.core.request import FinishReason, Request
from quire.engine.client import EngineInfo, ReplicaStats, Stats
from quire.engine.edge.account import SequenceClock

LABELS = ("model_name", "engine")
ENGINE = "0"
"""vLLM's number of an engine among several; a server has one."""
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    *(5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0),
    *(480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BUCKETS = (1, 2, 5, 10, 20)


STORE = (
    ("gauge", "blocks", "Blocks in the folder behind the KV cache."),
    ("gauge", "bytes", "Bytes that they take."),
    ("counter", "written", "Blocks written there."),
    ("counter", "hits", "Blocks that came back from there."),
    ("counter", "misses", "Blocks that were to come back and were not there any more, or bad."),
    ("counter", "bad", "Blocks whose checksum or tokens were wrong."),
    ("counter", "dropped", "Blocks that were not kept, for want of time or room."),
)
"""Of `StoreStats`: kind of metric, name, help."""


REPLICA: tuple[tuple[str, str, str, Callable[[ReplicaStats], float]], ...] = (
    ("gauge", "up", "1 while this engine of several answers.", lambda one: one.up),
    ("gauge", "running", "Sequences in its batch.", lambda one: one.running),
    ("gauge", "waiting", "Sequences in its queue.", lambda one: one.waiting),
    ("gauge", "kv_usage", "Used share of its KV blocks.", lambda one: one.used_blocks / max(1, one.total_blocks)),
    ("counter", "generation_tokens", "Tokens it generated.", lambda one: one.generation_tokens),
    ("counter", "restarts", "Times it was started again.", lambda one: one.restarts),
)
"""Of `ReplicaStats`: kind of metric, name, help, value."""


def buckets_125(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `limit`."""
    values = [m * 10**e for e in range(len(str(max(limit, 1)))) for m in (1, 2, 5)]
    return tuple(v for v in values if v <= max(limit, 1))


class _StepCollector(Collector):
    """Gauges and totals of the latest `Stats`, read when Prometheus asks: a step costs one assignment."""

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self.stats = Stats(total_blocks=info.num_blocks)
        self.in_flight = 0
        self.paused = 0
        self.healthy = True
        self.updated = 0.0

    def collect(self) -> Iterable[Metric]:
        """The metric families of this moment."""
        stats, values = self.stats, (self.info.served_name, ENGINE)

        def gauge(name: str, help_text: str, value: float) -> Metric:
            family = GaugeMetricFamily(name, help_text, labels=LABELS)
            family.add_metric(values, value)
            return family

        def counter(name: str, help_text: str, value: float) -> Metric:
            family = CounterMetricFamily(name, help_text, labels=LABELS)
            family.add_metric(values, value)
            return family

        usage = stats.used_blocks / stats.total_blocks if stats.total_blocks else 0.0
        yield gauge("vllm:num_requests_running", "Sequences in the batch.", stats.running)
        yield gauge("vllm:num_requests_waiting", "Sequences in the queue.", stats.waiting)
        yield gauge("vllm:kv_cache_usage_perc", "Used share of the KV blocks, 1 = all.", usage)
        yield counter("vllm:num_preemptions", "Sequences preempted.", stats.preemptions)
        yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries)
        yield counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits)
        yield counter("vllm:prompt_tokens", "Prompt tokens processed.", stats.prompt_tokens)
        yield counter("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens)
        yield from self._drafts()
        yield gauge("quire:kv_waste_ratio", "Share of reserved KV slots that hold no token.", stats.waste)
        yield gauge("quire:kv_cached_blocks", "KV blocks that a prefix can hit, used or free.", stats.cached_blocks)
        yield counter("quire:engine_steps", "Engine steps.", stats.steps)
        yield counter("quire:engine_restarts", "Engines that were started after one died.", stats.restarts)
        yield counter("quire:numeric_errors", "Rows that ended because of NaN or infinity.", stats.numeric_errors)
        yield gauge("quire:requests_in_flight", "Sequences accepted and not finished.", self.in_flight)
        yield gauge("quire:requests_paused", "Requests that wait until somebody reads what came of them.", self.paused)
        yield gauge("quire:engine_healthy", "1 while the engine answers.", float(self.healthy))
        yield gauge("quire:model_load_seconds", "Seconds the model took to load.", self.info.load_seconds)
        yield gauge("quire:model_weight_bytes", "Bytes of the weights in memory.", self.info.weight_bytes)
        yield gauge("quire:kv_bytes_per_token", "Bytes of keys and values per token.", self.info.kv_bytes_per_token)
        if stats.bubbles:
            yield self._bubbles()
        if stats.replicas:
            yield from self._replicas()
        if stats.kv_store is not None:
            for kind, name, text in STORE:
                made = gauge if kind == "gauge" else counter
                yield made(f"quire:kv_store_{name}", text, getattr(stats.kv_store, name))
        yield self._cache_config()
        if stats.expert_pairs:
            yield gauge(
                "quire:expert_imbalance", "Pairs of the rank that had most, over the mean.", stats.expert_imbalance
            )
            yield self._experts()
        if self.info.max_loras:
            yield self._adapters()
        if self.info.pictures:
            yield counter("vllm:mm_cache_queries", "Pictures that prompts came to.", stats.picture_queries)
            yield counter("vllm:mm_cache_hits", "Pictures that were encoded already.", stats.picture_hits)

    def _drafts(self) -> Iterable[Metric]:
        """Totals of speculation; acceptance rate = accepted tokens / draft tokens."""
        stats, values = self.stats, (self.info.served_name, ENGINE)
        for name, text, value in (
            ("drafts", "Drafts verified.", stats.drafts),
            ("draft_tokens", "Tokens guessed ahead.", stats.draft_tokens),
            ("accepted_tokens", "Guessed tokens that were kept.", stats.accepted_tokens),
        ):
            family = CounterMetricFamily(f"vllm:spec_decode_num_{name}", text, labels=LABELS)
            family.add_metric(values, value)
            yield family
        name, text = "vllm:spec_decode_num_accepted_tokens_per_pos", "Those kept, by their place in the draft."
        family = CounterMetricFamily(name, text, labels=[*LABELS, "position"])
        for place, count in enumerate(stats.accepted_per_pos):
            family.add_metric([*values, str(place)], count)
        yield family

    def _bubbles(self) -> Metric:
        text = "Share of the time of steps that a rank of a pipeline waited for others, since the start."
        family = GaugeMetricFamily("quire:pipeline_bubble_ratio", text, labels=[*LABELS, "rank"])
        for rank, share in enumerate(self.stats.bubbles):
            family.add_metric([self.info.served_name, ENGINE, str(rank)], share)
        return family

    def _replicas(self) -> Iterable[Metric]:
        """Each of several engines of the model, by its number."""
        kinds: dict[str, type[GaugeMetricFamily | CounterMetricFamily]] = {
            "gauge": GaugeMetricFamily,
            "counter": CounterMetricFamily,
        }
        for kind, name, text, value in REPLICA:
            family = kinds[kind](f"quire:replica_{name}", text, labels=[*LABELS, "replica"])
            for number, stats in enumerate(self.stats.replicas):
                family.add_metric([self.info.served_name, ENGINE, str(number)], float(value(stats)))
            yield family

    def _experts(self) -> Metric:
        family = CounterMetricFamily(
            "quire:expert_pairs", "Pairs of a token and an expert it chose.", labels=[*LABELS, "rank"]
        )
        for rank, count in enumerate(self.stats.expert_pairs):
            family.add_metric([self.info.served_name, ENGINE, str(rank)], count)
        return family

    def _cache_config(self) -> Metric:
        info = self.info
        labels = {
            "model_name": info.served_name,
            "engine": ENGINE,
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "cache_dtype": info.kv_cache_dtype,
            "device": info.backend,
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's configuration.", labels=list(labels))
        family.add_metric(list(labels.values()), 1.0)
        return family

    def _adapters(self) -> Metric:
        """vLLM's shape: names in labels, the time of the latest step as the value."""
        stats = self.stats
        labels = {
            "max_lora": str(self.info.max_loras),
            "running_lora_adapters": ",".join(stats.running_adapters),
            "waiting_lora_adapters": ",".join(stats.waiting_adapters),
        }
        text = "LoRA adapters of sequences in the batch and in the queue."
        family = GaugeMetricFamily("vllm:lora_requests_info", text, labels=list(labels))
        family.add_metric(list(labels.values()), self.updated)
        return family


class EngineMetrics:
    """All metrics of one engine in a registry of their own (nothing global)."""

    def __init__(self, info: EngineInfo) -> None:
        self.registry = CollectorRegistry()
        self.steps = _StepCollector(info)
        self.registry.register(self.steps)
        ProcessCollector(registry=self.registry)
        model = info.served_name

        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, help_text, LABELS, buckets=buckets, registry=self.registry)
            return made.labels(model, ENGINE)

        def latency(name: str, help_text: str) -> Histogram:
            return histogram(f"vllm:{name}_seconds", help_text, LATENCY_BUCKETS)

        lengths = buckets_125(info.max_model_len)
        per_token = "vllm:request_time_per_output_token_seconds"
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Received to first token.", TTFT_BUCKETS)
        self._itl = histogram("vllm:inter_token_latency_seconds", "Gap between tokens.", TOKEN_GAP_BUCKETS)
        self._tpot = histogram(per_token, "(E2E - TTFT) / (tokens - 1).", TOKEN_GAP_BUCKETS)
        self._e2e = latency("e2e_request_latency", "Received to last token.")
        self._queue = latency("request_queue_time", "Received to first scheduled.")
        self._prefill = latency("request_prefill_time", "First scheduled to first token.")
        self._decode = latency("request_decode_time", "First token to last token.")
        self._inference = latency("request_inference_time", "First scheduled to last token.")
        self._prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", lengths)
        self._generated = histogram("vllm:request_generation_tokens", "Tokens of a finished sequence.", lengths)
        self._n = histogram("vllm:request_params_n", "Sequences asked for.", N_BUCKETS)
        self._max_tokens = histogram("vllm:request_params_max_tokens", "Token limit asked for.", lengths)
        self._step_tokens = histogram("vllm:iteration_tokens_total", "Tokens of a step.", STEP_TOKEN_BUCKETS)
        success = Counter(
            "vllm:request_success",
            "Sequences by why they ended.",
            [*LABELS, "finished_reason"],
            registry=self.registry,
        )
        self._finished = {r: success.labels(model, ENGINE, r) for r in ("stop", "length", "abort", "error")}
        rejected = "Requests refused before the engine saw them."
        self._rejected = Counter("quire:requests_rejected", rejected, ["model_name", "reason"], registry=self.registry)
        self._model = model

    def step(self, stats: Stats) -> None:
        """Take the figures of one engine step."""
        if stats.step_tokens and stats.steps != self.steps.stats.steps:
            self._step_tokens.observe(stats.step_tokens)
        self.steps.stats, self.steps.updated = stats, time.time()

    def tokens(self, clock: SequenceClock, count: int, now: float) -> None:
        """`count` >= 1 new tokens of a sequence arrived together at `now`."""
        if clock.tokens == 0:
            clock.first = now
            self._ttft.observe(now - clock.arrival)
        else:
            self._itl.observe(now - clock.last)
        for _ in range(count - 1):
            self._itl.observe(0.0)
        clock.last = now
        clock.tokens += count

    def sequence_end(self, clock: SequenceClock, reason: FinishReason) -> None:
        """A sequence ended."""
        self._finished[reason].inc()
        if reason not in ("stop", "length") or clock.tokens == 0:
            return
        self._generated.observe(clock.tokens)
        self._e2e.observe(clock.last - clock.arrival)
        if clock.tokens > 1:
            self._tpot.observe((clock.last - clock.first) / (clock.tokens - 1))
        timing = clock.timing
        if timing is not None:
            self._queue.observe(timing.scheduled - timing.arrival)
            self._prefill.observe(timing.first_token - timing.scheduled)
            self._decode.observe(timing.last_token - timing.first_token)
            self._inference.observe(timing.last_token - timing.scheduled)

    def request_end(self, request: Request) -> None:
        """All sequences of a request ended."""
        self._prompt.observe(len(request.prompt))
        self._n.observe(request.params.n)
        if request.params.max_tokens is not None:
            self._max_tokens.observe(request.params.max_tokens)

    def rejected(self, reason: str) -> None:
        """A request was refused; `reason` is one of a few fixed words."""
        self._rejected.labels(self._model, reason).inc()

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)
