"""What a reply and the access log say of a request."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

from live_server import LiveServer, live, wait_until
from quire.core.errors import ConfigError
from quire.core.request import Output, Timing
from quire.engine.frontend.request_times import SequenceClock, timings
from quire.server.server_options import ServerOptions
from stub_engine import StubEngine

ASKED = {"quire": {"timings": True}}


def check(found: dict[str, Any], prompt: int, generated: int) -> None:
    """Every time is there, and they add up."""
    assert (found["prompt_tokens"], found["generated_tokens"]) == (prompt, generated)
    assert (found["preemptions"], found["engine_restarts"]) == (0, 0)
    assert 0 <= found["queue_seconds"] <= found["ttft_seconds"] <= found["e2e_seconds"]
    assert found["decode_seconds"] >= (generated - 1) * 0.002
    parts = found["queue_seconds"] + found["prefill_seconds"] + found["decode_seconds"]
    assert parts <= found["e2e_seconds"] + 1e-4


def test_a_reply_says_where_the_time_went_if_asked() -> None:
    with live(StubEngine(step_seconds=0.002)) as server:
        assert "quire" not in server.complete([9, 9, 9], max_tokens=4)
        reply = server.post("/v1/completions", {"prompt": [9, 9, 9], "max_tokens": 4, **ASKED})
        found = reply.json()["quire"]
        assert found["request_id"] == reply.headers["x-request-id"] and found["id"] == server.stub.submitted[-1].id
        assert "cache" not in found and "prompts" not in found
        check(found["timings"], 3, 4)
        assert set(server.chat(max_tokens=2, quire={})["quire"]) == {"request_id", "id"}
        several = server.complete([[9], [9, 9]], max_tokens=3, **ASKED)["quire"]
        assert set(several) == {"request_id", "prompts"}
        for i, each in enumerate(several["prompts"]):
            assert each["id"] == server.stub.submitted[-2 + i].id
            check(each["timings"], 1 + i, 3)


def test_one_that_a_stop_string_ended_has_all_its_times() -> None:
    with live(StubEngine(step_seconds=0.002)) as server:
        server.stub.script = server.tokenizer.encode("stop me here")
        found = server.complete("a", max_tokens=50, stop="me", **ASKED)
        assert found["choices"][0]["stop_reason"] == "me"
        times = found["quire"]["timings"]
        assert times["decode_seconds"] > 0 and times["prefill_seconds"] is not None


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_ends_with_it(path: str, usage: bool) -> None:
    with live() as server:
        said = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
        body = {**said, "max_tokens": 3, **ASKED} | ({"stream_options": {"include_usage": True}} if usage else {})
        events, done = server.events(path, body)
        assert done and [("quire" in event) for event in events] == [False] * (len(events) - 1) + [True]
        assert events[-1]["choices"] == [] and events[-1]["quire"]["timings"]["generated_tokens"] == 3
        assert ("usage" in events[-1]) == usage


def test_wishes_that_mean_nothing_are_named() -> None:
    with live() as server:
        for wish, param in (({"timings": 1}, "quire.timings"), (True, "quire")):
            reply = server.post("/v1/completions", {"prompt": "x", "quire": wish})
            assert reply.status_code == 400 and reply.json()["error"]["param"] == param
        reply = server.post("/v1/completions", {"prompt": "x", "quire": {"timing": True}})
        assert reply.status_code == 200 and "quire.timing" in reply.headers["warning"]
    with live(strict=True) as server:
        reply = server.post("/v1/completions", {"prompt": "x", "quire": {"timing": True}})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "quire.timing"


def test_times_of_several_sequences_and_of_none() -> None:
    clocks = [SequenceClock(10.0), SequenceClock(10.0)]
    assert timings(clocks, 5).e2e_seconds is None and timings(clocks, 5).queue_seconds is None
    for start, clock in enumerate(clocks):
        clock.first, clock.last, clock.tokens = 12.0 + start, 14.0 + start, 4
        told = Timing(arrival=10.0, scheduled=11.0 + start, first_token=11.5 + start, last_token=13.5 + start)
        clock.note(Output(request_id="r", preemptions=1 + start, restarts=start, timing=told))
    clocks[1].cut("abort")
    found = timings(clocks, 5)
    assert (found.queue_seconds, found.prefill_seconds, found.decode_seconds) == (1.0, 0.5, 3.5)
    assert (found.ttft_seconds, found.e2e_seconds) == (2.0, 5.0)
    assert (found.generated_tokens, found.preemptions, found.engine_restarts) == (8, 3, 1)


def lines(server: LiveServer, capsys: pytest.CaptureFixture[str], count: int) -> list[str]:
    """What the access log wrote, once that is as many lines."""
    found: list[str] = []

    def written() -> bool:
        found.extend(capsys.readouterr().out.splitlines())
        return len(found) >= count

    wait_until(written)
    return found


def test_the_access_log_has_a_line_of_json_for_each_request(capsys: pytest.CaptureFixture[str]) -> None:
    with live(access_log="json", api_key=("one", "two")) as server:
        key = {"authorization": "Bearer one"}
        body = {"prompt": [9, 9], "max_tokens": 3, "n": 2, "stream": True}
        reply = server.post("/v1/completions?secret=1", body, headers=key | {"x-request-id": "mine"})
        server.post("/v1/completions", {"prompt": "x", "temperature": "hot"}, headers=key)
        server.post("/v1/completions", {"prompt": "x"})
        first, second, third = (json.loads(line) for line in lines(server, capsys, 3))
    assert reply.status_code == 200 and first["request_id"] == "mine" and first["tenant"] == "key 0"
    assert (first["method"], first["path"], first["status"]) == ("POST", "/v1/completions", 200)
    assert first["ids"] == [server.stub.submitted[0].id] and first["model"] == "stub"
    assert first["finish_reasons"] == ["length", "length"] and first["completion_tokens"] == 6
    assert first["cached_tokens"] == 1 and first["timings"]["prompt_tokens"] == 2
    assert first["seconds"] >= first["timings"]["e2e_seconds"] - 0.001
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first["time"])
    assert second["status"] == 400 and "ids" not in second and second["tenant"] == "key 0"
    assert third["status"] == 401 and "tenant" not in third
    assert not any(secret in str([first, second, third]) for secret in ("secret", "one", "hot"))


def test_a_client_that_left_is_logged_with_what_it_got(capsys: pytest.CaptureFixture[str]) -> None:
    with live(StubEngine(step_seconds=0.002), access_log="json") as server:
        body = {"prompt": "x", "max_tokens": 250}
        with pytest.raises(Exception, match="timed out"):
            server.post("/v1/completions", body, timeout=0.1)
        (line,) = (json.loads(line) for line in lines(server, capsys, 1))
    assert line["status"] == 499 and line["finish_reasons"] == ["abort"]
    assert 0 < line["timings"]["generated_tokens"] < 250 and line["timings"]["decode_seconds"] > 0


def test_the_access_log_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    with live(access_log="text") as server:
        server.complete("hello", max_tokens=3)
        server.http.get("/nothing%0Ahere")
        first, second = lines(server, capsys, 2)
    assert re.search(r'"POST /v1/completions" 200 0\.\d{3} s id=\w+ tokens=\d+\(\d+ cached\)\+3 queue=', first)
    assert re.search(r" ttft=\d\.\d{3} tokens/s=\d+\.\d", first), "speed of decoding"
    assert '"GET /nothing%0Ahere" 404' in second and "tokens" not in second


def test_nothing_is_logged_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with live() as server:
        server.complete()
    assert capsys.readouterr().out == ""
    with pytest.raises(ConfigError, match="--access-log 'yes' is not one of off, text, json"):
        ServerOptions(access_log="yes").validate()


class Broken:
    """Fails on every exchange."""

    def see(self, _: object) -> None:
        raise RuntimeError("broken")

    def close(self) -> None:
        """Nothing."""


def test_a_watcher_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with live() as server:
        server.state.watchers = (Broken(),)
        assert msgspec.json.decode(server.http.get("/version").content)
        wait_until(lambda: "Broken failed on request" in caplog.text)
        server.state.watchers = ()
