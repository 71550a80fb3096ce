"""Prometheus metrics of one engine: vLLM's names, so that existing dashboards work, and quire's own under `quire:`.

TTFT, ITL, TPOT and E2E are taken where the server receives tokens, counted from the moment the request was received:
TTFT = first token - received, ITL = gap between consecutive tokens (tokens of one step have gap 0), E2E = last token -
received, TPOT = (E2E - TTFT) / (tokens - 1). Each of a request's `n` sequences is observed by itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from quire.core.request import FinishReason, Request
from quire.engine.client import EngineInfo
from quire.engine.frontend.request_times import SequenceClock
from quire.engine.stat_field import PrometheusMetric, annotated
from quire.engine.stats import Stats

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
FAMILIES: dict[str, type[GaugeMetricFamily | CounterMetricFamily]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
}


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

    def collect(self) -> Iterable[Family]:
        """The metric families of this moment."""
        stats, info = self.stats, self.info
        yield from self._families([stats])
        if stats.replicas:
            yield from self._families(stats.replicas, "replica")
        if stats.kv_store is not None:
            yield from self._families([stats.kv_store])
        for name, text, value in (
            ("requests_in_flight", "Sequences accepted and not finished.", self.in_flight),
            ("requests_paused", "Requests that wait until somebody reads what came of them.", self.paused),
            ("engine_healthy", "1 while the engine answers.", float(self.healthy)),
            ("model_load_seconds", "Seconds the model took to load.", info.load_seconds),
            ("model_weight_bytes", "Bytes of the weights in memory.", info.weight_bytes),
            ("kv_bytes_per_token", "Bytes of keys and values per token.", info.kv_bytes_per_token),
        ):
            family = GaugeMetricFamily(f"quire:{name}", text, labels=LABELS)
            family.add_metric([info.served_name, ENGINE], value)
            yield family
        yield self._cache_config()
        if info.max_loras:
            yield self._adapters()

    def _families(self, parts: Sequence[Struct], label: str = "") -> Iterable[Family]:
        """What the fields of structs of one kind ask for. `label`: name of the label that tells these apart."""
        for name, metric in annotated(type(parts[0]), PrometheusMetric).items():
            if not self._has(metric.needs):
                continue
            names = [*LABELS, *filter(None, (label, metric.label))]
            family = FAMILIES[metric.kind](metric.name, metric.help, labels=names)
            for number, part in enumerate(parts):
                values = [self.info.served_name, ENGINE, *([str(number)] if label else [])]
                found = getattr(part, name) if metric.value is None else metric.value(part)
                if not metric.label:
                    family.add_metric(values, float(found))
                for place, value in enumerate(found if metric.label else ()):
                    family.add_metric([*values, str(place)], value)
            yield family

    def _has(self, name: str) -> bool:
        """Whether what a metric needs is there."""
        return not name or bool(getattr(self.stats, name, None) or getattr(self.info, name, None))

    def _cache_config(self) -> Family:
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

    def _adapters(self) -> Family:
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
