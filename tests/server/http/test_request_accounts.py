"""Work of the engine in a tenant's counters, the access log and traces, whatever route asked for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from live_server import LiveServer, live, wait_until
from quire.server.http.access_log import AccessLog
from quire.server.http.activity import Counts
from real_server import real

BACKGROUND = {"model": "stub", "input": "hi", "max_output_tokens": 5, "background": True}
VECTORS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["def add(a, b):", [9, 9, 9]][:1]},
    "/v1/score": {"text_1": "a sum", "text_2": ["of numbers", "of words"]},
    "/score": {"text_1": "a sum", "text_2": "of numbers"},
    "/v1/rerank": {"query": "a sum", "documents": ["of numbers", "of words"]},
    "/rerank": {"query": "a sum", "documents": ["of numbers"]},
    "/api/embed": {"model": "", "input": ["def add(a, b):", "x"]},
    "/api/embeddings": {"model": "", "prompt": "def add(a, b):"},
}


def lines(capsys: pytest.CaptureFixture[str], count: int) -> list[dict[str, Any]]:
    """So many lines of the access log that are about the engine."""
    found: list[dict[str, Any]] = []

    def written() -> bool:
        each = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        found.extend(line for line in each if "ids" in line)
        return len(found) >= count

    wait_until(written)
    return found


def counts(server: LiveServer, tenant: str = "") -> Counts:
    return server.state.activity.tenants.get(tenant, Counts())


def test_vectors_are_counted_and_logged(capsys: pytest.CaptureFixture[str]) -> None:
    with real(num_blocks=64) as server:
        server.state.watchers = (AccessLog("json"),)
        before = 0
        for path, body in VECTORS.items():
            named = {"model": server.service.names[0]} if "model" in body else {}
            reply = server.post(path, body | named)
            assert reply.status_code == 200, reply.text
            [line] = lines(capsys, 1)
            read = line["timings"]["prompt_tokens"]
            told = reply.json().get("usage", {}).get("prompt_tokens", reply.json().get("prompt_eval_count", read))
            assert read == told > 0 and line["path"] == path and line["model"] == server.service.names[0]
            assert line["completion_tokens"] == line["timings"]["generated_tokens"] == 0
            wait_until(lambda: counts(server).prompt_tokens > before)  # noqa: B023
            assert counts(server).prompt_tokens == before + read and counts(server).output_tokens == 0
            before += read


@pytest.mark.parametrize("end", ["done", "cancelled", "failed"])
def test_the_background_is_counted_once_it_is_done(end: str, capsys: pytest.CaptureFixture[str]) -> None:
    with live(api_key=("a", "b"), access_log="json") as server:
        server.http.headers["authorization"] = "Bearer b"
        server.stub.paused = end == "cancelled"
        if end == "failed":
            server.stub.poison = 2
        made = server.post("/v1/responses", BACKGROUND).json()
        if end == "cancelled":
            assert server.post(f"/v1/responses/{made['id']}/cancel", {}).status_code == 200
            server.stub.paused = False
        [line] = lines(capsys, 1)
        status = server.http.get(f"/v1/responses/{made['id']}").json()["status"]
        assert status == {"done": "completed"}.get(end, end) or (end, status) == ("done", "incomplete")
        assert line["background"] is True and line["tenant"] == "key 1" and line["timings"]["prompt_tokens"] > 0
        own = counts(server, "key 1")
        assert own.requests == (2 if end == "cancelled" else 1), "it is no second request"
        assert own.prompt_tokens == line["timings"]["prompt_tokens"] and own.failed == (end == "failed")
        assert own.output_tokens == line["completion_tokens"] and (end != "done" or own.output_tokens == 5)
        assert counts(server, "key 0").requests == 0
        page = server.http.get("/metrics").text
        assert 'http_requests_total{handler="/v1/responses",method="POST",status="2xx"} 1.0' in page


def test_beams_are_counted() -> None:
    with live() as server:
        body = {"prompt": [9, 9, 9], "max_tokens": 3, "use_beam_search": True, "n": 2, "ignore_eos": True}
        seen: list[Any] = []
        see: Callable[[Any], None] = server.state.activity.see
        server.state.activity.see = lambda exchange: (seen.append(exchange.generation), see(exchange))[1]  # type: ignore
        assert server.post("/v1/completions", body).status_code == 200
        wait_until(lambda: counts(server).output_tokens == 6)
        assert seen[0].timings().generated_tokens >= 5 == 1 + 2 * 2, "tokens that were drawn for it"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/score", "/v1/rerank"])
def test_vectors_have_spans(path: str) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from span_collector import ended_spans, spans_of

    with real(num_blocks=64) as server:
        tracer, kept = spans_of(server)
        assert server.post(path, VECTORS[path]).status_code == 200
        spans = ended_spans(tracer, kept, 1)
        assert all(span.attributes["gen_ai.usage.input_tokens"] > 0 for span in spans)


def test_the_background_has_a_span() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from span_collector import ended_spans, spans_of

    with live() as server:
        tracer, kept = spans_of(server)
        assert server.post("/v1/responses", BACKGROUND).status_code == 200

        [span] = ended_spans(tracer, kept, 1)
        assert span.attributes["gen_ai.usage.output_tokens"] == 5
        assert span.attributes["gen_ai.operation.name"] == "chat"
