"""Loads on servers made up for the test, over real sockets: what is sent, when, on which connections; what is kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from live_server import live
from quire.bench import serving
from quire.bench.http import Client, HttpFailure
from quire.bench.loads import ServeLoad
from quire.bench.sending import on_loop, until
from quire.cli import main
from quire.figures.files import read_rows
from quire.figures.metric_definitions import METRICS
from stub_engine import StubEngine, expected

Body = dict[str, Any]
Say = Callable[[Body], list[Body]]


class MessageAnswer:
    """A server that keeps connections, and says of a completion what `say` returns, an event each."""

    def __init__(self, say: Say, keep: int = 1 << 30, wait: float = 0.0) -> None:
        self._say, self._keep, self._wait = say, keep, wait
        self.bodies: list[Body] = []
        self.heads: list[bytes] = []
        self.connections = self.flying = self.most = 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            for _ in range(self._keep):
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(h[15:]) for h in head.split(b"\r\n") if h.startswith(b"Content-Length:")), 0)
                await self._answer(head, await reader.readexactly(length), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        if head.startswith(b"GET"):
            models = b'{"data": [{"id": "m", "owned_by": "somebody"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(models), models))
            return
        self.heads.append(head)
        self.bodies.append(json.loads(body))
        self.flying += 1
        self.most = max(self.most, self.flying)
        await asyncio.sleep(self._wait)
        self.flying -= 1
        said = [json.dumps(event).encode() for event in self._say(self.bodies[-1])] + [b"[DONE]"]
        chunks = [b"data: %s\r\n\r\n" % each for each in said]  # as other servers end their lines
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for chunk in chunks:
            writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        writer.write(b"0\r\n\r\n")

    @asynccontextmanager
    async def at(self) -> AsyncIterator[str]:
        """Its URL."""
        made = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        async with made:
            yield f"http://127.0.0.1:{made.sockets[0].getsockname()[1]}"
            for writer in self._writers:
                writer.close()


def measured(server: MessageAnswer, **options: Any) -> serving.ServingResult:
    async def run() -> serving.ServingResult:
        async with server.at() as url:
            return await serving.measure(ServeLoad(base_url=url, **options))

    return asyncio.run(run())


def words(body: Body) -> list[Body]:
    """As many events as tokens were asked for; a server without usage, ids or clock."""
    return [{"choices": [{"text": "x"}]}] * body["max_tokens"]


def test_connections_are_kept_and_a_bare_server_is_enough() -> None:
    server = MessageAnswer(words)
    found = measured(server, num_prompts=12, max_concurrency=3, output_len="2:5", input_len="4", warmup=2)
    assert 3 <= server.connections <= 4 and len(server.bodies) == 14
    assert [r.error for r in found.records] == [None] * 12
    assert sorted(r.output_tokens for r in found.records) == sorted(b["max_tokens"] for b in server.bodies[2:])
    assert all(r.input_tokens == 4 for r in found.records)
    assert all("quire" not in body and "return_token_ids" not in body for body in server.bodies)
    assert len({head for head in server.heads if b"X-Request-Id: bench-" in head}) == 12
    assert found.joined() is None and (found.server.name, found.server.version) == ("somebody", "")


def test_a_connection_that_the_server_closes_is_made_again() -> None:
    server = MessageAnswer(words, keep=2)
    found = measured(server, num_prompts=9, max_concurrency=1, output_len="1", warmup=0)
    assert [r.error for r in found.records] == [None] * 9 and server.connections >= 5


def test_only_so_many_are_in_flight_and_nothing_is_sent_early() -> None:
    server = MessageAnswer(words, wait=0.01)
    found = measured(server, num_prompts=8, max_concurrency=2, request_rate=400.0, output_len="2")
    assert server.most == 2
    for record in found.records:
        assert record.sent >= (record.intended if record.ready is None else record.ready) >= record.intended
    held = [r for r in found.records if r.ready is not None]
    assert held and max(r.late for r in held) > 0.005, "the bound made them wait"
    assert all(r.client < r.late for r in held)


def test_a_turn_contains_what_was_answered_before() -> None:
    def say(body: Body) -> list[Body]:
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        usage |= {"prompt_tokens_details": {"cached_tokens": 1}}
        ids = [7000 + i for i in range(body["max_tokens"])]
        return [{"choices": [{"token_ids": [i]}]} for i in ids] + [{"choices": [], "usage": usage}]

    server = MessageAnswer(say)
    found = measured(server, num_prompts=3, turns="3", input_len="5", output_len="2", max_concurrency=1, warmup=0)
    for first, second, third in (server.bodies[i : i + 3] for i in (0, 3, 6)):
        a, b, c = (body["prompt"] for body in (first, second, third))
        assert (len(a), len(b), len(c)) == (5, 12, 19) and first["return_token_ids"]
        assert b[:7] == [*a, 7000, 7001] and c[:14] == [*b, 7000, 7001]
    assert [r.turn for r in found.records] == [0, 1, 2] * 3
    assert found.metrics()["prefix_hit_share"] == pytest.approx(9 / sum(r.input_tokens for r in found.records))
    assert not found.notes


def test_answers_without_ids_are_stood_in_for_and_a_failed_turn_ends_its_conversation() -> None:
    found = measured(MessageAnswer(words), num_prompts=2, turns="2", input_len="5", output_len="3")
    assert found.records[-1].input_tokens == 5 + 3 + 5
    assert "2 answers" in found.notes[0] or "4 answers" in found.notes[0]

    def say(body: Body) -> list[Body]:
        return [{"error": {"message": "no more"}}]

    failed = measured(MessageAnswer(say), num_prompts=2, turns="3", warmup=0)
    assert [r.error for r in failed.records] == ["HttpFailure: no more"] * 2
    assert failed.results()["errors"] == ["HttpFailure: no more"] and failed.metrics()["failed"] == 2


@pytest.mark.parametrize("event", [{"choices": 3}, {"choices": [], "usage": {"prompt_tokens": "many"}}])
def test_events_that_make_no_sense_fail_their_request_alone(event: Body) -> None:
    found = measured(MessageAnswer(lambda body: [event]), num_prompts=2)
    assert all("is malformed" in (r.error or "") for r in found.records)


def test_two_answers_at_once_for_one_question_close_the_connection() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}" * 2)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        left.set()

    left = asyncio.Event()

    async def run() -> None:
        made = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with made, Client(f"http://127.0.0.1:{made.sockets[0].getsockname()[1]}") as client:
            try:
                assert await client.get("/a") == {}
            except HttpFailure as error:
                assert "malformed" in str(error)
            await left.wait()

    asyncio.run(run())


def test_waiting_ends_when_it_is_due() -> None:
    async def run() -> list[float]:
        found = []
        for wait in (0.0, 0.0003, 0.0015, 0.02):
            due = time.perf_counter() + wait
            await until(due)
            found.append(time.perf_counter() - due)
        return found

    assert min(on_loop(run())) >= 0


def test_rows_are_appended_and_their_command_makes_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    with live(StubEngine(step_seconds=0.001), api_key=("secret",)) as server:
        words = ["quire", "bench", "serve", "--base-url", server.url, "--api-key", "secret", "--num-prompts", "6"]
        words += ["--goodput", "ttft:5000", "--goodput", "e2e:9000", "--request-rate", "200", "--input-len", "4:9"]
        for _ in range(2):
            monkeypatch.setattr("sys.argv", [*words, "-o", str(out)])
            with pytest.raises(SystemExit) as ended:
                main()
            assert ended.value.code in (None, 0), capsys.readouterr().err
    rows = read_rows(out)
    assert len(rows) == 2 and rows[0].key == rows[1].key
    row = rows[0]
    assert (row.kind, row.benchmark, row.engine.name, row.model.name) == ("measured", "serve", "quire", "stub")
    assert (row.load.requests, row.load.arrivals, row.load.rate) == (6, "poisson", 200.0)
    assert set(row.metrics) <= set(METRICS) and row.metrics["attainment"] == 1.0
    assert row.dialect["goodput_per_s"] == "ttft:5000 e2e:9000" and "secret" not in row.command
    assert "--request-rate 200" in row.command and row.command.count("--goodput") == 2
    assert "queue_ms_p50" in row.metrics


def test_conversations_with_the_server_are_those_of_its_engine() -> None:
    """What the stub answers follows from the whole prompt: the second one is the first, its answer, and more."""
    with live(StubEngine()) as server:
        load = ServeLoad(base_url=server.url, num_prompts=1, turns="2", input_len="6", output_len="4", warmup=0)
        found = asyncio.run(serving.measure(load))
        assert [r.error for r in found.records] == [None, None]
        first, second = server.stub.submitted
        assert list(second.prompt[:10]) == [*first.prompt, *expected(first)] and len(second.prompt) == 16
