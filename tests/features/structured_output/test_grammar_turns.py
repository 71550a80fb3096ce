"""Grammars of many tenants: readers, turns and bounds, and what a bomb costs others."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from live_server import LiveServer, live, wait_until
from quire.core.errors import BadRequest, Overloaded
from quire.core.structured import StructuredOutputsParams
from quire.server.apis.openai import structured_output
from quire.text.bounded_process import JobProcess
from quire.text.structured import grammar_queue, grammar_reader
from quire.text.structured.grammar_queue import GrammarJob, GrammarJobs
from quire.text.structured.grammar_reader import GrammarReader
from quire.text.structured.vocabulary import vocabulary_of
from shaped import VOCAB, tokenizer

END = 4


def bomb(number: int) -> str:
    """An expression that takes seconds to read, another one for each number."""
    return f"(.{{0,300}}x){{{300 + number}}}"


def asked(regex: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=regex)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarReader]:
    """Three readers of their own, with little patience."""
    monkeypatch.setattr(grammar_reader, "SECONDS", 0.3)
    monkeypatch.setattr(grammar_reader, "FIRST_SECONDS", 0.1)
    found = GrammarReader(3)
    yield found
    found.close()


def ask(made: GrammarReader, regex: str, tenant: str) -> Future[grammar_reader.CompiledGrammar]:
    return made.ask(asked(regex), (END,), vocabulary_of(tokenizer(), VOCAB), tenant=tenant)


# ------------------------------------------------------------------------------------------------------------ over HTTP


def reply(server: LiveServer, user: str, order: list[str], **shape: Any) -> httpx.Response:
    """What a tenant's request gets; `order`: whose came before."""
    body = {"prompt": "a", "max_tokens": 40, "user": user, "structured_outputs": shape}
    found = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    order.append(user)
    return found


def test_more_grammars_of_a_tenant_than_may_wait_are_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_queue, "OF_A_TENANT", 2)
    monkeypatch.setattr(grammar_reader, "SECONDS", 0.5)
    monkeypatch.setattr(structured_output, "PATIENCE", 2.0)
    with live() as server, ThreadPoolExecutor(12) as clients:
        found = [clients.submit(reply, server, "bomber", [], regex=bomb(100 + i)) for i in range(12)]
        replies = [each.result() for each in found]
    assert {each.status_code for each in replies} <= {400, 429}
    refused = next(each for each in replies if "of this tenant wait" in each.text)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1


# ------------------------------------------------------------------------------------------------------------ a reader


def test_a_bomb_ends_its_fork_alone_and_is_remembered(made: GrammarReader, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[int] = []
    plain = JobProcess.do

    def counted(self: JobProcess, *args: Any) -> Any:
        jobs.append(self._process.pid)
        return plain(self, *args)

    monkeypatch.setattr(JobProcess, "do", counted)
    assert ask(made, "x", "a").result().completion
    for _ in range(3):
        with pytest.raises(BadRequest, match="of CPU time"):
            ask(made, bomb(0), "a").result()
    assert ask(made, "y", "a").result().completion
    assert len(jobs) == 3 and len(set(jobs)) == 1


def test_what_takes_long_gives_way_to_what_was_not_tried(made: GrammarReader) -> None:
    """Two of three readers may be at work on bombs: the third tries what comes."""
    bombs = [ask(made, bomb(i), "bomber") for i in range(12)]
    assert ask(made, "z", "honest").result(60).completion
    done = sum(each.done() for each in bombs)
    assert done <= 4, f"{done} of them were read before"


def test_a_reader_that_hangs_is_no_server_error_and_is_not_remembered(
    made: GrammarReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: Any) -> Any:
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(JobProcess, "do", late)
        with pytest.raises(Overloaded, match="busy"):
            ask(made, "x{2}", "").result()
    assert ask(made, "x{2}", "").result().completion


def test_a_reader_that_is_killed_is_replaced_and_the_grammar_read(made: GrammarReader) -> None:
    assert ask(made, "x{3}", "").result().completion
    (process,) = made._processes
    os.kill(process._process.pid, signal.SIGKILL)
    assert ask(made, "x{4}", "").result().completion


def test_idle_readers_end_and_begin_anew(made: GrammarReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_reader, "IDLE_SECONDS", 0.05)
    assert ask(made, "x{5}", "").result().completion
    wait_until(lambda: not made._processes and not made._threads, seconds=30)
    assert ask(made, "x{6}", "").result().completion


def test_equal_questions_of_a_tenant_are_read_once(made: GrammarReader, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[bytes] = []
    plain = JobProcess.do
    monkeypatch.setattr(JobProcess, "do", lambda self, data, *rest: jobs.append(data) or plain(self, data, *rest))  # type: ignore[func-returns-value]
    assert len({each.result() for each in [ask(made, "x{7}", "a") for _ in range(9)]}) == 1
    assert len(jobs) == 1


def test_long_bodies_are_refused_before_they_are_written_down() -> None:
    visited = grammar_reader._has_more_than(10, [[0] * 5, [0] * 1_000_000])
    assert visited and not grammar_reader._has_more_than(10, {"a": [1, "b"]})
    with pytest.raises(BadRequest, match="more than the"):
        shape = StructuredOutputsParams(json={"enum": ["x" * 9] * 100_000})
        grammar_reader.READER.ask(shape, (END,), vocabulary_of(tokenizer(), VOCAB))


# -------------------------------------------------------------------------------------------------------------- turns


def job(tenant: str, number: int) -> GrammarJob:
    found = GrammarJob(tenant, (b"%d" % number, 0), {}, frozenset(), vocabulary_of(tokenizer(), VOCAB))
    found.asked.append(Future())
    return found


def served(waiting: GrammarJobs, cost: dict[str, float], count: int) -> list[str]:
    """Whose jobs are read, one after the other."""
    order = []
    for _ in range(count):
        taken = waiting.take(True)
        assert taken is not None
        waiting.charge(taken.tenant, cost[taken.tenant])
        order.append(taken.tenant)
    return order


def test_tenants_share_by_the_time_that_theirs_take() -> None:
    waiting = GrammarJobs()
    for i in range(20):
        for tenant in "ab":
            waiting.add(job(tenant, i), 1)
    order = served(waiting, {"a": 2.0, "b": 0.1}, 20)
    assert order.count("a") == 1 and order.count("b") == 19


def test_a_pause_gains_a_tenant_nothing_and_costs_it_nothing() -> None:
    waiting = GrammarJobs()
    for i in range(6):
        waiting.add(job("a", i), 1)
    served(waiting, {"a": 1.0}, 4)
    waiting.add(job("late", 0), 1)
    waiting.add(job("late", 1), 1)
    assert served(waiting, {"a": 1.0, "late": 1.0}, 4) in (["late", "a", "late", "a"], ["late", "a", "a", "late"])


def test_what_nobody_waits_for_any_more_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_queue, "OF_A_TENANT", 2)
    waiting = GrammarJobs()
    first, second = job("a", 0), job("a", 1)
    waiting.add(first, 1)
    waiting.add(second, 1)
    with pytest.raises(Overloaded, match="of this tenant"):
        waiting.add(job("a", 2), 1)
    first.asked[0].cancel()
    waiting.add(job("a", 3), 1)
    assert waiting.take(False) is second


def test_slow_jobs_wait_for_a_reader_that_may_take_its_time() -> None:
    waiting = GrammarJobs()
    slow, quick = job("a", 0), job("b", 1)
    waiting.put_off(slow)
    waiting.add(quick, 1)
    assert waiting.take(False) is quick and waiting.take(False) is None
    assert waiting.take(True) is slow and waiting.take(True) is None


def test_use_is_remembered_of_so_many_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_queue, "REMEMBERED", 10)
    waiting = GrammarJobs()
    for i in range(100):
        waiting.add(job(f"t{i}", i), 1)
        served(waiting, {f"t{i}": 0.1}, 1)
    assert len(waiting._used) <= 11
