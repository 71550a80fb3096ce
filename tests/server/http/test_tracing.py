"""Traces: a span for each prompt, its parent, and what is sent to a collector."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from live_server import live, wait_until
from quire.core.errors import ConfigError
from quire.server.http.access_log import watchers
from quire.server.server_options import ServerOptions
from span_collector import ended_spans, spans_of
from stub_engine import StubEngine

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_without_the_option_nothing_of_it_is_imported() -> None:
    names = "[name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))]"
    code = f"import sys, quire.server.draining, quire.server.run; assert not {names}, {names}"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert watchers(ServerOptions()) == ()


def test_where_it_is_not_installed_the_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'quire\[otel\]'"):
        watchers(ServerOptions(otlp_traces_endpoint="http://localhost:4318"))


pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")


@pytest.mark.parametrize("endpoint", ["grpc://localhost:4317", "http://localhost:4317", "localhost:4318", ""])
def test_other_protocols_are_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="OTLP over HTTP"):
        watchers(ServerOptions(otlp_traces_endpoint=endpoint))


def test_a_span_says_what_vllms_says() -> None:
    before = time.time_ns()
    with live(StubEngine(step_seconds=0.002)) as server:
        tracer, kept = spans_of(server)
        body = {"prompt": [[9, 9], [8]], "max_tokens": 4, "n": 2, "temperature": 0.5, "top_p": 0.9}
        server.post("/v1/completions", body, headers={"traceparent": PARENT, "tracestate": "a=b"})
        server.chat(max_tokens=3)
        server.post("/v1/completions", {"prompt": "x", "max_tokens": 0})
        server.stub.poison = 1
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 3}).status_code == 500
        first, second, chat, failed = ended_spans(tracer, kept, 4)
        tracer.close()
    assert {span.name for span in (first, second, chat, failed)} == {"llm_request"}
    for span in (first, second):
        assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
        assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2] and span.context.trace_state == {"a": "b"}
    assert chat.parent is None and chat.context.trace_id != first.context.trace_id
    found = dict(first.attributes)
    assert found["gen_ai.request.id"] == server.stub.submitted[0].id
    assert (found["gen_ai.usage.prompt_tokens"], found["gen_ai.usage.completion_tokens"]) == (2, 8)
    assert (found["gen_ai.request.n"], found["gen_ai.request.temperature"], found["gen_ai.request.top_p"]) == (
        2,
        0.5,
        0.9,
    )
    assert found["gen_ai.request.max_tokens"] == 4 and found["gen_ai.response.model"] == "stub"
    assert found["gen_ai.response.finish_reasons"] == ("length", "length")
    assert found["gen_ai.operation.name"] == "text_completion" and found["http.response.status_code"] == 200
    times = [found[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e")]
    assert times == sorted(times) and found["gen_ai.latency.time_in_model_decode"] >= 3 * 0.002
    assert before <= first.start_time < first.end_time <= time.time_ns()
    assert dict(chat.attributes)["gen_ai.operation.name"] == "chat" and chat.status.is_ok
    assert not failed.status.is_ok and dict(failed.attributes)["http.response.status_code"] == 500
    assert first.resource.attributes["service.name"] == "quire"


class Collector(BaseHTTPRequestHandler):
    """Keeps what was posted."""

    got: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.got.append((self.path, body))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_spans_reach_a_collector() -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got: list[tuple[str, bytes]] = []
    with HTTPServer(("127.0.0.1", 0), type("Got", (Collector,), {"got": got})) as collector:
        thread = threading.Thread(target=collector.serve_forever, daemon=True)
        thread.start()
        with live(otlp_traces_endpoint=f"http://127.0.0.1:{collector.server_port}") as server:
            server.complete(max_tokens=2)
            wait_until(lambda: server.state.active == 0)
            server.state.close()
        collector.shutdown()
    (path, body), *rest = got
    assert path == "/v1/traces" and not rest
    sent = ExportTraceServiceRequest.FromString(body)
    assert [span.name for span in sent.resource_spans[0].scope_spans[0].spans] == ["llm_request"]


def test_a_collector_that_is_not_there_holds_nothing_up() -> None:
    with live(otlp_traces_endpoint="http://127.0.0.1:9") as server:
        server.complete(max_tokens=2)
        began = time.monotonic()
        server.state.close()
        assert time.monotonic() - began < 10
