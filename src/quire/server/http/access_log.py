"""Who watches exchanges, by the server's options: the access log, one line a request on standard output, and traces."""

from __future__ import annotations

import importlib.util
import logging
import sys
from datetime import UTC, datetime

import msgspec
from msgspec import UNSET, UnsetType

from quire.core.errors import ConfigError
from quire.engine.frontend.request_times import Timings
from quire.server.http.exchange import Exchange, Watcher
from quire.server.server_options import ServerOptions

MAX_PATH = 512


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of JSON. `seconds`: headers to the last byte. What follows `tenant` is of requests that the engine saw;
    `ids` are their names in the engine's log, a prompt each. `background`: a request that was answered before left this
    work behind."""

    time: str
    request_id: str
    client: str
    method: str
    path: str
    status: int
    seconds: float
    tenant: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    ids: list[str] | UnsetType = UNSET
    cached_tokens: int | UnsetType = UNSET
    completion_tokens: int | UnsetType = UNSET
    finish_reasons: list[str | None] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    background: bool | UnsetType = UNSET


class AccessLog:
    """Writes a line for every exchange; no prompt, no text and no key is in it, nor what follows `?` in an address."""

    def __init__(self, kind: str) -> None:
        self._line = json_line if kind == "json" else text_line
        self._logger = logging.getLogger("quire.access")
        self._logger.propagate = False
        self._logger.setLevel(logging.INFO)
        self._handler = logging.StreamHandler(sys.stdout)
        self._handler.setFormatter(logging.Formatter("%(message)s"))
        self._logger.addHandler(self._handler)

    def see(self, exchange: Exchange) -> None:
        """Write the line."""
        self._logger.info(self._line(entry(exchange)))

    def close(self) -> None:
        """Write what is left."""
        self._logger.removeHandler(self._handler)
        self._handler.close()


def entry(exchange: Exchange) -> Entry:
    """What there is to say of an exchange."""
    path = exchange.scope.get("raw_path") or exchange.scope["path"].encode()
    found = Entry(
        time=datetime.fromtimestamp(exchange.arrived, UTC).isoformat(timespec="milliseconds"),
        request_id=exchange.request_id,
        client=exchange.client,
        method=exchange.method,
        path=path.decode("latin-1")[:MAX_PATH],
        status=exchange.status,
        seconds=round(exchange.seconds, 6),
        tenant=exchange.tenant.name or UNSET,
    )
    generation = exchange.generation
    if generation is None:
        return found
    usage = generation.usage()
    return msgspec.structs.replace(
        found,
        model=exchange.model,
        ids=[request.id for request in generation.requests],
        cached_tokens=usage.prompt_tokens_details.cached_tokens,
        completion_tokens=usage.completion_tokens,
        finish_reasons=generation.finish_reasons,
        timings=generation.timings(),
        background=exchange.background or UNSET,
    )


def json_line(found: Entry) -> str:
    """The entry as one JSON object."""
    return msgspec.json.encode(found).decode()


def text_line(found: Entry) -> str:
    """Line for eyes: uvicorn's, then what else is known."""
    path = found.path.encode("unicode_escape").decode()
    words = [f'{found.time} {found.client or "-"} "{found.method} {path}" {found.status} {found.seconds:.3f} s']
    words.append(f"id={found.request_id}")
    if found.tenant is not UNSET:
        words.append(f"tenant={found.tenant!r}")
    if found.background is not UNSET:
        words.append("background")
    if found.timings is not UNSET:
        times = found.timings
        words.append(f"tokens={times.prompt_tokens}({found.cached_tokens} cached)+{found.completion_tokens}")
        names = ("queue", "prefill", "decode", "ttft")
        spans = [(name, getattr(times, f"{name}_seconds")) for name in names]
        words += [f"{name}={seconds:.3f}" for name, seconds in spans if seconds is not None]
        if times.decode_seconds and times.generated_tokens > 1:
            words.append(f"tokens/s={(times.generated_tokens - 1) / times.decode_seconds:.1f}")
    return " ".join(words)


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
