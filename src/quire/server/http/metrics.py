"""What /metrics says of HTTP."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from quire.text.structured.grammar_reader import READER

BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0),
)


class HttpMetrics:
    """Counted by route: `handler` is a registered path, never what the client sent. A stream ends with its last byte.

    `http_requests` has statuses as 2xx, 4xx, as that tool does; `quire:http_responses` tells 400 and 429 apart.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        text = "Seconds from a request's headers to the end of its response."
        labels = ["handler", "method"]
        self._seconds = Histogram("http_request_duration_seconds", text, labels, buckets=BUCKETS, registry=registry)
        labels = ["handler", "method", "status"]
        self._requests = Counter("http_requests", "Requests over HTTP.", labels, registry=registry)
        self._responses = Counter("quire:http_responses", "HTTP responses.", ["route", "status"], registry=registry)

        text = "Answers that are not all that their JSON schema asks for, of which a grammar could not hold some."
        self._invalid = Counter("quire:answers_with_schema_errors", text, registry=registry)

        text = "Grammars and JSON schemas that requests wait for: they are read, or are to be."
        Gauge("quire:grammars_waiting", text, registry=registry).set_function(lambda: READER.waiting)

    def checked(self, invalid: int) -> None:
        """Answers were checked, of which so many are invalid."""
        self._invalid.inc(invalid)

    def ended(self, handler: str, method: str, status: int, seconds: float) -> None:
        """A request was answered, or its client left (499)."""
        self._seconds.labels(handler, method).observe(seconds)
        self._requests.labels(handler, method, f"{status // 100}xx").inc()
        self._responses.labels(handler, str(status)).inc()
