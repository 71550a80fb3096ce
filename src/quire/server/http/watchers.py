"""Who watches exchanges, by the server's options."""

from __future__ import annotations

import importlib.util

from quire.core.errors import ConfigError
from quire.server.http.access import AccessLog
from quire.server.http.exchange import Watcher
from quire.server.options import ServerOptions


def watchers(options: ServerOptions) -> tuple[Watcher, ...]:
    """The access log and traces, where they were asked for; `ConfigError` where one cannot be had."""
    found: list[Watcher] = []
    if options.access_log != "off":
        found.append(AccessLog(options.access_log))
    if options.otlp_traces_endpoint is not None:
        found.append(_tracer(options.otlp_traces_endpoint))
    return tuple(found)


def _tracer(endpoint: str) -> Watcher:
    # Traces have dependencies of their own, which nobody else is to wait for.
    for name in ("opentelemetry.sdk", "opentelemetry.exporter"):
        if importlib.util.find_spec("opentelemetry") is None or importlib.util.find_spec(name) is None:
            message = "--otlp-traces-endpoint: OpenTelemetry is not installed; pip install 'quire[otel]'"
            raise ConfigError(message, param="otlp_traces_endpoint")
    from quire.server.http.tracing import Tracer, exporter

    return Tracer(exporter(endpoint))
