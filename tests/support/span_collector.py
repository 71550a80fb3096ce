"""A collector that keeps the spans that a server sends."""

from __future__ import annotations

from typing import Any

from live_server import LiveServer, wait_until


def spans_of(server: LiveServer) -> tuple[Any, Any]:
    """A tracer that keeps its spans in memory, and those."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from quire.server.http.tracing import Tracer

    kept = InMemorySpanExporter()
    tracer = Tracer(kept)
    server.state.watchers = (tracer,)
    return tracer, kept


def ended_spans(tracer: Any, kept: Any, count: int) -> Any:
    """`count` spans, once they have ended: a span ends after the client has its answer."""

    def there() -> bool:
        tracer._provider.force_flush()
        return len(kept.get_finished_spans()) >= count

    wait_until(there)
    return kept.get_finished_spans()
