"""OpenTelemetry traces (`quire[otel]`): a span for each prompt that the engine had, under its caller's trace.

Names of the attributes are vLLM's, and those of OpenTelemetry's conventions for generative AI beside them. There is no
prompt and no text in a span. Requests that the engine never saw have none.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import quire
from quire.core.errors import ConfigError
from quire.core.request import Request
from quire.server.http.exchange import Exchange, Work

EXPORT_SECONDS = 3.0
"""That sending a batch may take; as long, the end of the server waits for a collector that does not answer."""


class Tracer:
    """Makes spans at the end of exchanges; a thread of the SDK sends them, in batches from a bounded queue."""

    def __init__(self, exporter: SpanExporter) -> None:
        own = Resource({"service.name": "quire", "service.version": quire.__version__})
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES name a service among others, whatever program it is.
        resource = own.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("quire.server")
        self._context = TraceContextTextMapPropagator()

    def see(self, exchange: Exchange) -> None:
        """One span per prompt, from the request's arrival to the end of its response."""
        generation = exchange.generation
        if generation is None:
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in exchange.scope["headers"]}
        parent = self._context.extract(headers)
        start = int(exchange.arrived * 1e9)
        for request in generation.requests:
            span = self._tracer.start_span(
                "llm_request",
                context=parent,
                kind=SpanKind.SERVER,
                attributes=attributes(exchange, generation, request),
                start_time=start,
            )
            if exchange.status >= 400 or "error" in generation.finish_reasons:
                span.set_status(Status(StatusCode.ERROR))
            span.end(start + int(exchange.seconds * 1e9))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def attributes(exchange: Exchange, generation: Work, request: Request) -> dict[str, Any]:
    """What a span says of a prompt; times are in seconds."""
    params, times = request.params, generation.timings(request)
    reasons = generation.finish_reasons_of(request)
    found = {
        "gen_ai.operation.name": exchange.operation,
        "gen_ai.request.model": exchange.model,
        "gen_ai.response.model": exchange.model,
        "gen_ai.request.id": request.id,
        "gen_ai.request.n": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.response.finish_reasons": tuple(reason for reason in reasons if reason is not None) or None,
        "gen_ai.usage.prompt_tokens": times.prompt_tokens,
        "gen_ai.usage.completion_tokens": times.generated_tokens,
        "gen_ai.usage.input_tokens": times.prompt_tokens,
        "gen_ai.usage.output_tokens": times.generated_tokens,
        "gen_ai.usage.num_sequences": params.n,
        "gen_ai.latency.time_in_queue": times.queue_seconds,
        "gen_ai.latency.time_to_first_token": times.ttft_seconds,
        "gen_ai.latency.time_in_model_prefill": times.prefill_seconds,
        "gen_ai.latency.time_in_model_decode": times.decode_seconds,
        "gen_ai.latency.time_in_model_inference": _sum(times.prefill_seconds, times.decode_seconds),
        "gen_ai.latency.e2e": times.e2e_seconds,
        "http.response.status_code": exchange.status,
        "quire.request_id": exchange.request_id,
        "quire.preemptions": times.preemptions,
        "quire.engine_restarts": times.engine_restarts,
    }
    return {name: value for name, value in found.items() if value is not None}


def _sum(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first + second


def exporter(endpoint: str) -> SpanExporter:
    """OTLP over HTTP to `endpoint`, whose path is /v1/traces where it has none; `ConfigError` for another protocol."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 4317:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint}: traces are sent by OTLP over HTTP, not gRPC: http://HOST:4318",
            param="otlp_traces_endpoint",
        )
    path = parts.path if parts.path.strip("/") else "/v1/traces"
    return OTLPSpanExporter(endpoint=urlunsplit(parts._replace(path=path)), timeout=EXPORT_SECONDS)
