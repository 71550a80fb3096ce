"""Replicas that compute prompts and others that go on with them: the same answers, and no prompt computed twice."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from chaos_load import Load, bodies, requests, texts_of
from chaos_load import sum_of_metric as metric
from engine_answers import run
from live_server import wait_until
from oracle import BACKENDS
from quire.cache.tiers import StoreRates
from quire.core.config import flat_config
from quire.core.errors import ConfigError
from quire.core.request import Output
from quire.engine.client import EngineKilled, StepReport
from quire.engine.local import LocalEngine
from quire.engine.processes.unfinished import UnfinishedRequest
from quire.engine.start import start_engine
from replica_edge import Edge
from serving_process import Serving
from supervised_engines import Engine, request
from ways_to_serve import written

PREFILL = 1
native = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")


class Prompting(Engine):
    """A stub whose requests may leave some steps after their first token."""

    def poll(self, timeout: float) -> StepReport | None:
        report = super().poll(timeout)
        if report is None:
            return None
        rng = random.Random(self._stats.steps)
        return replace(report, portable=tuple({o.request_id for o in report.outputs if rng.random() < 0.5}))


def test_prompts_are_computed_by_some_and_gone_on_with_by_others() -> None:
    edge = Edge(prefill=PREFILL, kind=Prompting)
    edge.submit(*(request(f"r{i}", 60, n=1 + i % 3) for i in range(30)))
    edge.finish()
    prompts, first, second = (engines[0] for engines in edge.engines)
    assert len(prompts.submitted) == 30 and not any(each.emitted for each in prompts.submitted)
    went_on = [*first.submitted, *second.submitted]
    assert len(went_on) > 20 and all(any(told or told is None for told in each.emitted) for each in went_on)
    assert abs(len(first.submitted) - len(second.submitted)) <= 8, "shared by those that go on"
    assert set(edge.restarts.values()) == {0}, "to leave is no death"


@pytest.mark.parametrize("seed", range(8))
def test_whatever_dies_nothing_is_lost_and_nothing_comes_twice(seed: int) -> None:
    rng, edge = random.Random(seed), Edge(end=EngineKilled, prefill=1 + seed % 2, kind=Prompting)
    for i in range(40):
        edge.submit(request(f"{seed} {i}", rng.randint(1, 30), n=rng.choice((1, 1, 2))))
        edge.poll(rng.randrange(3))
        if rng.random() < 0.2:
            edge.engines[rng.randrange(3)][-1].dead = True
        paused = [name for name in edge.live if rng.random() < 0.1 and edge.client.pause(name)]
        edge.poll(rng.randrange(2))
        for name in paused:
            edge.client.resume(name)
        if rng.random() < 0.15:
            gone = rng.choice([*edge.live])
            edge.client.abort(gone)
            del edge.live[gone]
            edge.ends = {key: end for key, end in edge.ends.items() if key[0] != gone}
    edge.finish()


def test_where_no_replica_goes_on_those_for_prompts_do() -> None:
    edge = Edge(end=EngineKilled, prefill=PREFILL, kind=Prompting, pause=30.0)
    for engines in edge.engines[1:]:
        engines[0].dead = True
    wait_until(lambda: not any(replica.ready for replica in edge.client._replicas[1:]))
    edge.submit(*(request(f"r{i}", 20) for i in range(6)))
    edge.poll(400)
    assert len(edge.ends) == 6 and len(edge.engines[0][0].submitted) == 6
    edge.client.close()


def test_where_no_replica_computes_prompts_the_others_do() -> None:
    edge = Edge(end=EngineKilled, prefill=PREFILL, kind=Prompting, pause=30.0)
    edge.engines[0][0].dead = True
    wait_until(lambda: not edge.client._replicas[0].ready)
    edge.submit(*(request(f"r{i}", 20) for i in range(6)))
    edge.poll(400)
    assert len(edge.ends) == 6
    edge.client.close()


def test_tokens_that_another_engine_computed_are_no_cached_tokens_of_the_client() -> None:
    kept = UnfinishedRequest(request("r"))
    kept.replay_request()
    kept.take(Output(request_id="r", tokens=[5], cached_tokens=3))
    kept.replay_request()
    output = Output(request_id="r~2", tokens=[6], cached_tokens=200)
    kept.take(output)
    assert output.cached_tokens == 3


@native
def test_a_request_may_leave_once_others_find_its_prompt(tmp_path: Path) -> None:
    """And not before; one with a prompt of less than a block at its first token."""
    options: dict[str, Any] = {"data_parallel_size": 2, "prefill_replicas": 1, "kv_store": str(tmp_path / "kv")}
    config = flat_config(max_model_len=256, **options)
    real = start_engine(config)
    found: dict[str, int] = {}
    asked = [replace(each, params=replace(each.params, max_tokens=120)) for each in requests()]
    for each in asked:
        real.submit(each)
    made: dict[str, int] = {}
    while real.has_work:
        for output in real.step():
            made[output.request_id] = made.get(output.request_id, 0) + len(output.tokens)
        for name in real.portable():
            assert name not in found and made[name] > 0
            found[name] = made[name]
    assert found.keys() == {each.id for each in asked}
    counts = real.stats().kv_store
    assert counts is not None and counts.written >= sum(len(each.prompt) // 16 for each in asked) // 2
    real.close()


@native
def test_who_goes_on_finds_the_recurrent_state_behind_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreRates, "pays", lambda self, nbytes, tokens: True)
    options: dict[str, Any] = {"model": str(written(tmp_path / "model", "states")), "max_model_len": 256}
    asked = [replace(request(f"r{i}", 160), prompt=tuple(range(3 + i, 80 + i))) for i in range(4)]
    alone = run(LocalEngine(flat_config(**options)), asked)
    split = options | {"data_parallel_size": 2, "prefill_replicas": 1, "kv_store": str(tmp_path / "kv")}
    first, second = (start_engine(flat_config(**split)) for _ in range(2))
    for each in asked:
        first.submit(each)
    made: dict[str, list[int]] = {each.id: [] for each in asked}
    found: dict[str, int] = {}
    left: set[str] = set()
    while first.has_work:
        for output in first.step():
            made[output.request_id] += output.tokens
        time.sleep(0.01)  # the thread that writes blocks has its turn: steps of this model take less than a file
        for name in first.portable():
            first.abort(name)
            left.add(name)
            second.submit(replace(asked[int(name[1:])], emitted=(tuple(made[name]),)))
    assert left == set(made), "all leave"
    while second.has_work:
        for output in second.step():
            made[output.request_id] += output.tokens
            found[output.request_id] = max(found.get(output.request_id, 0), output.cached_tokens)
    assert made == {name: answer.tokens for name, answer in alone.items()}
    assert min(found.values()) >= 64, "the last whole block of each prompt of 77 tokens, or one behind it"
    for engine in (first, second):
        engine.check()
        engine.close()


@native
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_of_both_kinds_answers_as_one_engine(ranks: int, tmp_path: Path) -> None:
    """Of engines of so many ranks, and while some are killed; those that go on read what the others computed."""
    asked, options = bodies(8), ["--threads", "1", "--max-model-len", "1024", "--tensor-parallel-size", str(ranks)]
    with Serving(*options) as server, server.up() as client:
        alone = [texts_of(client.post("/v1/completions", json=body)) for body in asked]
    split = ["--data-parallel-size", "2", "--prefill-replicas", "1", "--kv-store", str(tmp_path / "kv")]
    with Serving(*options, *split, "--max-engine-deaths", "100") as server, server.up() as client:
        client.timeout = 120.0
        load = Load(client, asked)
        wait_until(lambda: metric(client, "quire:kv_store_hits") > 0, seconds=60)
        for kill in range(2):
            os.kill(sorted(server.engines())[kill], signal.SIGKILL)
            wait_until(lambda kill=kill: metric(client, "quire:engine_restarts_total") > kill, seconds=60)  # type: ignore[misc]
        load.finish(alone)
    assert "Traceback" not in "".join(server.log)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill_replicas": 1}, "at least one must be left"),
        ({"prefill_replicas": 2, "data_parallel_size": 2, "kv_store": "x"}, "at least one must be left"),
        ({"prefill_replicas": 1, "data_parallel_size": 2}, "--kv-store"),
        ({"prefill_replicas": 1, "data_parallel_size": 2, "kv_store": "x", "nnodes": 2, "node_rank": 0,
          "master_addr": "127.0.0.1", "cluster_secret_file": "x"}, "one host's"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        flat_config(**options).validate()
    assert caught.value.param == "prefill_replicas"
