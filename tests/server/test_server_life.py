"""What happens around requests: clients that leave, full queues, dying engines, draining, slow and broken HTTP."""

from __future__ import annotations

import asyncio
import re
import resource
import signal
import socket
import time

import httpx
import pytest

from live_server import LONG, LiveServer, live, open_stream, read_all, wait_until
from stub_engine import StubEngine, expected, stub_info
from stub_server import StubServer


def test_fifty_concurrent_streams_complete_with_their_own_tokens() -> None:
    """T1 at a small scale."""

    async def stream(client: httpx.AsyncClient, seed: int) -> tuple[int, str, bool]:
        body = {"prompt": f"x = {seed}", "max_tokens": 40, "seed": seed, "stream": True}
        text, done = "", False
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    text += httpx.Response(200, content=line[6:]).json()["choices"][0]["text"]
        return seed, text, done

    async def run(url: str) -> list[tuple[int, str, bool]]:
        async with httpx.AsyncClient(base_url=url, timeout=20.0, limits=httpx.Limits(max_connections=50)) as client:
            return await asyncio.gather(*(stream(client, seed) for seed in range(50)))

    with live(StubEngine(step_seconds=0.002)) as server:
        results = asyncio.run(run(server.url))
        wanted = {r.seed: server.tokenizer.decode(expected(r)) for r in server.stub.submitted}
        assert len(wanted) == 50
        for seed, text, done in results:
            assert done and text == wanted[seed]
        wait_until(lambda: server.engine.in_flight == 0 and server.state.active == 0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_requests(path: str, stream: bool) -> None:
    body = {"max_tokens": 200, "n": 2, "stream": stream}
    body |= {"prompt": ["x", "y"]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    with live(StubEngine(step_seconds=0.01)) as server:
        with (
            httpx.Client(base_url=server.url, timeout=0.3) as client,
            pytest.raises(httpx.ReadTimeout),
            client.stream("POST", path, json=body) as reply,
        ):
            for number, _ in enumerate(reply.iter_lines()):
                if number == 3:
                    raise httpx.ReadTimeout("left")
        wait_until(lambda: server.stub.running == 0)
        assert sorted(server.stub.aborted) == sorted(r.id for r in server.stub.submitted)
        wait_until(lambda: server.engine.in_flight == 0 and server.state.active == 0)
        assert server.complete("again", max_tokens=2)["choices"][0]["finish_reason"] == "length"


def test_a_full_queue_is_a_429_with_retry_after() -> None:
    """T17 at a small scale."""
    stub = StubEngine(stub_info(max_num_queued_reqs=4))
    stub.paused = True
    with live(stub) as server:
        streams = [open_stream(server) for _ in range(2)]
        wait_until(lambda: server.engine.in_flight == 2)
        for body in ({"prompt": "a", "n": 3}, {"prompt": ["a", "b", "c"]}, {"prompt": "a", "n": 3, "stream": True}):
            reply = server.post("/v1/completions", body)
            assert reply.status_code == 429 and reply.json()["error"]["type"] == "rate_limit_error"
            assert int(reply.headers["retry-after"]) >= 1
        assert len(stub.submitted) == 2, "a request that does not fit as a whole leaves nothing behind"
        stub.paused = False
        assert all("[DONE]" in read_all(s) for s in streams)
        assert server.post("/v1/completions", {"prompt": "a", "n": 3}).status_code == 200
        assert 'quire:requests_rejected_total{model_name="stub",reason="queue_full"} 3.0' in metrics(server)


def test_many_prompt_tokens_in_flight_are_bounded_too() -> None:
    stub = StubEngine()
    stub.paused = True
    with live(stub) as server:
        server.engine.admission.max_prompt_tokens = 250
        streams = [open_stream(server, {"prompt": [5] * 200, "max_tokens": 2})]
        wait_until(lambda: server.engine.in_flight == 1)
        assert server.post("/v1/completions", {"prompt": [5] * 60, "max_tokens": 1}).status_code == 429
        stub.paused = False
        assert "[DONE]" in read_all(streams[0])


@pytest.mark.parametrize("after", [0, 3])
def test_a_numeric_error_ends_one_request(after: int) -> None:
    stub = StubEngine()
    with live(stub) as server:
        stub.poison = after
        reply = server.post("/v1/completions", {"prompt": "a", "max_tokens": 9})
        error = reply.json()["error"]
        assert reply.status_code == 500 and "NaN" in error["message"]
        assert (error["type"], error["code"]) == ("engine_error", "numerics")
        stub.step_seconds = 0.01
        reply = server.post("/v1/completions", {"prompt": "a", "max_tokens": 9, "stream": True})
        if after:
            assert reply.status_code == 200 and '"code":"numerics"' in reply.text and "[DONE]" not in reply.text
        else:
            assert reply.status_code == 500
        stub.poison = None
        assert server.complete("a", max_tokens=9)["usage"]["completion_tokens"] == 9
        assert 'vllm:request_success_total{engine="0",finished_reason="error",model_name="stub"} 2.0' in metrics(server)


@pytest.mark.parametrize(
    ("kind", "code"), [("BadRequest", None), ("ContextTooLong", "context_length_exceeded"), ("Unknown", None)]
)
def test_what_the_engine_cannot_serve_is_the_requests_fault(kind: str, code: str | None) -> None:
    stub = StubEngine()
    stub.poison, stub.poison_kind = 0, kind
    with live(stub) as server:
        for stream in (False, True):
            reply = server.post("/v1/completions", {"prompt": "a", "max_tokens": 9, "stream": stream})
            assert reply.status_code == (500 if kind == "Unknown" else 400)
            assert reply.json()["error"]["code"] == code
        stub.poison = 2
        body = {"prompt": "a", "max_tokens": 9, "stream": True, "seed": 0}  # of other seeds 2 tokens may have no text
        text = server.post("/v1/completions", body).text
        assert "event: error" in text
        assert ("invalid_request_error" in text) == (kind != "Unknown")


def test_readiness_means_progress() -> None:
    stub = StubEngine()
    stub.paused = True
    with live(stub, stall_timeout=0.05) as server:
        assert server.http.get("/readyz").status_code == 200
        stream = open_stream(server)
        wait_until(lambda: server.http.get("/readyz").status_code == 503)
        stub.paused = False
        assert "[DONE]" in read_all(stream)
        assert server.http.get("/readyz").status_code == 200


def metrics(server: LiveServer) -> str:
    reply = server.http.get("/metrics")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/plain")
    return reply.text


NAMES = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:iteration_tokens_total_bucket",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket",
    "vllm:request_inference_time_seconds_bucket",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_params_n_bucket",
    "vllm:request_params_max_tokens_bucket",
    "vllm:cache_config_info",
    "quire:kv_waste_ratio",
    "quire:kv_cached_blocks",
    "quire:engine_steps_total",
    "quire:numeric_errors_total",
    "quire:requests_in_flight",
    "quire:model_load_seconds",
    "quire:model_weight_bytes",
    "quire:kv_bytes_per_token",
    "quire:http_responses_total",
]


def test_metrics_have_vllms_names_and_true_values() -> None:
    with live(StubEngine(step_seconds=0.002)) as server:
        for _ in range(2):
            server.complete("a", max_tokens=5, n=2)
        server.stub.script = server.tokenizer.encode("stop me here")
        server.complete("a", max_tokens=50, stop="me")
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 0})
        text = metrics(server)
        for name in NAMES:
            assert re.search(rf"^{name}\{{.*(model_name|route)=", text, re.MULTILINE), name
        counts = dict(re.findall(r"^(\S+?)(?:\{.*\})? (\S+)$", text, re.MULTILINE))
        assert counts["vllm:time_to_first_token_seconds_count"] == "5.0"
        assert counts["vllm:e2e_request_latency_seconds_count"] == "5.0"
        assert float(counts["vllm:inter_token_latency_seconds_count"]) >= 4 * 4
        assert counts["vllm:request_queue_time_seconds_count"] == "5.0", "one ended by a stop string, too"
        assert counts["vllm:request_prefill_time_seconds_count"] == "5.0"
        assert counts["vllm:request_params_n_sum"] == "5.0"
        assert float(counts["vllm:generation_tokens_total"]) >= 20
        assert float(counts["vllm:e2e_request_latency_seconds_sum"]) >= 5 * 2 * 0.002
        assert 'quire:http_responses_total{route="/v1/completions",status="400"} 1.0' in text
        for reason, count in (("length", 4.0), ("stop", 1.0)):
            labels = f'{{engine="0",finished_reason="{reason}",model_name="stub"}}'
            assert f"vllm:request_success_total{labels} {count}" in text
        where = 'handler="/v1/completions",method="POST"'
        assert f"http_request_duration_seconds_count{{{where}}} 4.0" in text
        assert f'http_requests_total{{{where},status="2xx"}} 3.0' in text
        assert f'http_requests_total{{{where},status="4xx"}} 1.0' in text
        assert "vllm:lora_requests_info" not in text, "there is no room for adapters"


def test_a_reader_that_stops_reading_is_cut_off_and_aborted() -> None:
    """T3 at a small scale."""
    info = stub_info(max_model_len=1 << 20, num_blocks=1 << 16)
    with live(StubEngine(info), write_timeout=0.3) as server:
        body = {"prompt": "x", "max_tokens": 500_000, "logprobs": 20}
        sock = open_stream(server, body, window=4096)
        wait_until(lambda: server.stub.running == 1)
        wait_until(lambda: server.stub.running == 0, seconds=15)
        assert server.stub.aborted == [server.stub.submitted[0].id]
        sock.close()


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGHUP], [signal.SIGTERM, signal.SIGHUP]])
def test_sigterm_finishes_what_runs_refuses_what_comes_and_exits_with_0(signals: list[signal.Signals]) -> None:
    """T16 at a small scale."""
    if signal.SIGHUP in signals and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        pytest.skip("SIGHUP is ignored here, as under nohup, and by all that is started here")
    with (
        StubServer(shutdown_timeout=20) as served,
        served.client.stream("POST", "/v1/completions", json=LONG | {"max_tokens": 100, "stream": True}) as reply,
    ):
        lines = reply.iter_lines()
        next(lines)
        for each in signals:
            served.process.send_signal(each)
            time.sleep(0.1)
        with httpx.Client(base_url=served.client.base_url, timeout=5.0) as other:
            wait_until(lambda: other.get("/readyz").status_code == 503)
            refused = other.post("/v1/completions", json=LONG)
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert refused.headers["connection"] == "close"
        rest = list(lines)
        assert rest.count("data: [DONE]") == 1
        assert served.process.wait(5) == 0


def test_nohup_is_heeded_and_all_files_may_be_open() -> None:
    before, limits = signal.signal(signal.SIGHUP, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, limits[1]), limits[1]))
    try:
        served = StubServer(shutdown_timeout=20)
    finally:
        signal.signal(signal.SIGHUP, before)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with served:
        served.process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert served.client.get("/readyz").status_code == 200
        assert resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE) == (limits[1], limits[1])


def test_what_does_not_finish_in_time_gets_an_error_event() -> None:
    with (
        StubServer(shutdown_timeout=0.2) as served,
        served.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as reply,
    ):
        lines = reply.iter_lines()
        next(lines)
        served.process.send_signal(signal.SIGTERM)
        rest = "\n".join(lines)
        assert "event: error" in rest and "service_unavailable" in rest and "[DONE]" not in rest
        assert served.process.wait(5) == 0


def test_a_second_signal_ends_the_server_at_once() -> None:
    """T16."""
    with (
        StubServer(shutdown_timeout=60) as served,
        served.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as reply,
    ):
        lines = reply.iter_lines()
        next(lines)
        began = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(5) == 1
        assert time.monotonic() - began < 2


def test_a_third_signal_leaves_no_traceback() -> None:
    with (
        StubServer(shutdown_timeout=60) as served,
        served.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as reply,
    ):
        next(reply.iter_lines())
        for _ in range(3):
            served.process.send_signal(signal.SIGTERM)
            time.sleep(0.03)
        assert served.process.wait(5) == 1
        assert served.process.stderr is not None and b"Traceback" not in served.process.stderr.read()


def test_a_taken_port_is_named() -> None:
    from quire.core.errors import ConfigError
    from quire.server.http.address import bind, listen
    from quire.server.server_options import ServerOptions

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} is in use .* choose another --port"):
            bind(ServerOptions(port=port))
    bound = [bind(ServerOptions(port=port)) for _ in range(2)]  # nothing keeps two from it while neither listens
    bound[0].listen()
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port} is in use"):
        listen(bound[1], ServerOptions(port=port))
    for sock in bound:
        sock.close()
    with pytest.raises(ConfigError, match=r"--host 203\.0\.113\.7"):
        bind(ServerOptions(host="203.0.113.7", port=0))
