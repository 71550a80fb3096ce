"""What the live page tells beside metrics: counts of each tenant, and what went wrong lately.

Kept whether or not somebody looks, at some 10 microseconds for a request.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.server.http.exchange import Exchange

LOGGERS = ("quire.engine", "quire.server")
MAX_INCIDENTS = 100
MAX_PATH = 80
TOGETHER_SECONDS = 60.0
"""What happens again within this time counts as one incident that happened more often."""
FAILED, REFUSED = 500, (401, 403, 429, 503)


@dataclass
class Incident:
    """`first`, `last`: seconds since 1970. `level`: of the log, or "failed" and "refused" of requests. `tenant`: whose
    request it was; "" of the server's own."""

    first: float
    last: float
    level: str
    message: str
    tenant: str = ""
    count: int = 1


@dataclass
class Counts:
    """Counts of a tenant since the start: requests that were posted, those of them refused and failed, and tokens."""

    requests: int = 0
    refused: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass
class Activity:
    """Sees every exchange at its end (`Watcher`), and while `captured_logs` what is logged as a warning or worse."""

    tenants: dict[str, Counts] = field(default_factory=dict)
    incidents: deque[Incident] = field(default_factory=lambda: deque(maxlen=MAX_INCIDENTS))

    def see(self, exchange: Exchange) -> None:
        """An exchange has ended."""
        status = exchange.status
        failed = status >= FAILED and status not in REFUSED
        posted = exchange.method == "POST"  # probes and pages that ask once a second are no news
        refused = posted and status in REFUSED
        generation = exchange.generation
        if generation is not None and not failed:
            failed = "error" in generation.finish_reasons
        if failed or refused:
            self.note("failed" if failed else "refused", _incident_message(exchange), exchange.tenant.name)
        if not posted or status == 401:
            return
        counts = self.tenants.setdefault(exchange.tenant.name, Counts())
        counts.requests += not exchange.background
        counts.failed += failed
        counts.refused += refused
        if generation is not None:
            usage = generation.usage()
            counts.prompt_tokens += usage.prompt_tokens
            counts.output_tokens += usage.completion_tokens

    def tokens(self) -> dict[str, int]:
        """Tokens of prompts and outputs of each tenant since the start."""
        return {name: counts.prompt_tokens + counts.output_tokens for name, counts in self.tenants.items()}

    def close(self) -> None:
        """Finish nothing: there is nothing to finish."""

    def note(self, level: str, message: str, tenant: str = "") -> None:
        """Keep an incident."""
        now = time.time()
        for incident in reversed(self.incidents):
            if now - incident.last > TOGETHER_SECONDS:
                break
            if (incident.level, incident.message, incident.tenant) == (level, message, tenant):
                incident.count += 1
                incident.last = now
                self.incidents.remove(incident)
                self.incidents.append(incident)
                return
        self.incidents.append(Incident(now, now, level, message, tenant))

    @contextlib.contextmanager
    def captured_logs(self) -> Iterator[None]:
        """Note warnings and errors of the engine and the server meanwhile."""
        handler = _LogHandler(self)
        for name in LOGGERS:
            logging.getLogger(name).addHandler(handler)
        try:
            yield
        finally:
            for name in LOGGERS:
                logging.getLogger(name).removeHandler(handler)


def _incident_message(exchange: Exchange) -> str:
    if exchange.status == 401:
        return "a request without a valid key: 401"  # whoever sends those is not to choose what is read here
    where = exchange.scope["path"][:MAX_PATH]
    return f"{exchange.method} {where}: {exchange.status if exchange.status >= 400 else 'ended with an error'}"


class _LogHandler(logging.Handler):
    """The lock of a handler is held while it notes: it is called from any thread."""

    def __init__(self, activity: Activity) -> None:
        super().__init__(logging.WARNING)
        self._activity = activity

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._activity.note(record.levelname.lower(), record.getMessage())
        except Exception:
            self.handleError(record)
