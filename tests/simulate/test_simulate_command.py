"""`quire simulate`: traces, reports, rows, searches, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from quire.cli.app import app
from quire.core.errors import ConfigError
from quire.figures.files import read_rows
from quire.figures.metric_definitions import METRICS
from quire.simulate.requests import RequestStream
from quire.simulate.simulate_options import ClusterOptions, SimulatedLoad, limits_of

TABLE = '{"points": [[1, 0.01], [64, 0.012], [512, 0.06]], "per_key": 1e-7, "per_sequence": 1e-4}'
SMALL = ["--num-blocks", "300", "--max-model-len", "256"]


def quire(*words: str) -> str:
    result = CliRunner().invoke(app, ["simulate", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = tmp_path / "times.json"
    path.write_text(TABLE)
    return str(path)


def test_a_trace_reports_as_a_benchmark_does_and_writes_rows(tmp_path: Path, table: str) -> None:
    trace, out, rows = tmp_path / "trace.jsonl", tmp_path / "out.json", tmp_path / "rows.jsonl"
    asked = [
        {"timestamp": 500 * i, "input_length": 520, "output_length": 40 + i % 7, "hash_ids": [i % 3, 100 + i]}
        for i in range(40)
    ]
    trace.write_text("".join(json.dumps(each) + "\n" for each in asked))
    words = [
        str(trace),
        "--length-scale",
        "0.25",
        "--step-times",
        table,
        "--replicas",
        "2",
        *SMALL,
        "--goodput",
        "ttft:80",
    ]
    shown = quire(*words, "-o", str(out))
    assert "output tokens per s" in shown and "ttft" in shown and "measured" in shown
    results = json.loads(out.read_text())["results"]
    assert results["rates"]["completed"] == 40 and results["rates"]["goodput_requests_per_s"] > 0
    assert results["rates"]["output_tokens"] == sum(max(1, round(0.25 * each["output_length"])) for each in asked)
    assert results["engine"]["prefix_hit_share"] > 0.7, "beginnings of 128 tokens are shared"
    assert {"time", "replicas", "running", "waiting", "kv"} == results["curve"][0].keys()
    quire(*words, "--tenant", "a=1", "--tenant", "b=1", "-o", str(rows))
    found = read_rows(rows)
    assert [row.options.get("tenant", "") for row in found] == ["", "a", "b"]
    assert {row.kind for row in found} == {"simulated"} and found[0].load.arrivals == "trace"
    assert found[0].metrics.keys() <= METRICS.keys() and found[0].metrics["ttft_ms_p99"] > 0
    assert found[0].command.startswith("quire simulate") and len({row.key for row in found}) == 3
    assert found[1].metrics["requests_per_s"] + found[2].metrics["requests_per_s"] == pytest.approx(
        found[0].metrics["requests_per_s"]
    )


def test_how_many_replicas_hold_a_target(table: str) -> None:
    words = ["--step-times", table, *SMALL, "--num-prompts", "80", "--request-rate", "30", "--max-num-seqs", "4",
             "--replicas", "9", "--search", "replicas", "--slo"]  # fmt: skip
    shown = quire(*words, "ttft=300,itl=60")
    assert "1 replicas: p99 of" in shown and "not held" in shown
    said = shown.strip().splitlines()[-1]
    count = int(said.split()[0])
    assert f"{count} replicas hold ttft=300,itl=60 (p99), {count - 1} do not; " in said and 1 < count < 9
    result = CliRunner().invoke(app, ["simulate", *words, "ttft=1"])
    assert result.exit_code == 1 and "do not hold" in result.output


def test_a_named_gpu_is_predicted_by_its_datasheet(tmp_path: Path) -> None:
    shown = quire("--device", "h100", "--replicas", "3", "--prefill-replicas", "1", "--num-prompts", "30",
                  "--request-rate", "50", "--fail", "0.2:2", "--start-time", "0.1", *SMALL)  # fmt: skip
    assert "datasheet" in shown and "replicas lost" in shown and "blocks read" in shown


REFUSED: dict[str, tuple[list[str], str]] = {
    "router": (["--router", "best"], "'best' is not one of prefix, random"),
    "device": (["--device", "z9"], "not one of this, a100-40gb"),
    "failure": (["--fail", "5"], "is not like 60:0"),
    "failed replica": (["--fail", "5:1"], "replicas are 0 to 0"),
    "autoscale": (["--autoscale", "4"], "is not like 2:16"),
    "autoscale bounds": (["--autoscale", "4:2"], "needs 1 <= least <= most"),
    "tenant": (["--tenant", "x"], "is not like name=share"),
    "two tenants": (["--tenant", "x=1", "--tenant", "x=2"], "each name once"),
    "search": (["--search", "replicas"], "needs --slo"),
    "slo": (["--search", "replicas", "--slo", "ttfb=3"], "is not one of ttft=NUMBER"),
    "all prefill": (["--prefill-replicas", "1"], "one at least must decode"),
    "no trace": (["nothing.jsonl"], "No such file"),
    "closed": (["--arrivals", "closed"], "name another"),
    "a trace's option": (["--trace-speed", "2"], "none is named"),
    "length": (["--input-len", "9:3"], "low <= high"),
    "negative": (["--patience", "-1"], "--patience -1.0 must not be negative"),
    "gaps of a request": (["--goodput", "itl:50"], "name tpot"),
    "cells": (["--cells", "2"], "1 replicas to share"),
    "memory": (["--replicas", "90000", "--num-blocks", "90000"], "blocks in all"),
    "speculation": (["--speculative-config", '{"method": "ngram"}'], "No such option"),
    "step times": (["--step-times", "nothing.json"], "No such file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(name: str, table: str) -> None:
    words, reason = REFUSED[name]
    times = [] if name in ("device", "step times") else ["--step-times", table]
    result = CliRunner().invoke(app, ["simulate", *times, *words])
    said = str(result.exception) if isinstance(result.exception, ConfigError) else result.output
    assert result.exit_code and reason in said and len(said) < 500, said


@pytest.mark.parametrize(
    "text", ["", "[]", '{"points": []}', '{"points": [[2, 0.1], [1, 0.1]]}', '{"points": [[1, -1]]}',
             '{"points": [[1, 0]]}', '{"points": [[1, 1]], "more": 2}'],
)  # fmt: skip
def test_files_that_are_no_step_times_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    result = CliRunner().invoke(app, ["simulate", "--step-times", str(path)])
    assert isinstance(result.exception, ConfigError) and str(path) in str(result.exception)


def test_prompts_of_a_trace_share_what_their_blocks_share(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lengths = ((1024, [7, 8]), (1300, [7, 8, 9]), (700, [7, 5]))
    lines = [{"timestamp": 0, "input_length": n, "output_length": 3, "hash_ids": ids} for n, ids in lengths]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second, third = (
        ask.request(str(i), 4096).prompt for i, ask in enumerate(RequestStream(SimulatedLoad(), str(path)))
    )
    assert [len(first), len(second), len(third)] == [1024, 1300, 700]
    assert second[:1024] == first and third[:512] == first[:512] and third[512] != first[512]


def test_made_up_loads_are_the_same_for_a_seed_and_as_asked() -> None:
    load = SimulatedLoad(
        num_prompts=400, input_len="10:20", output_len="5", shared_prefix=32, prefixes=4, request_rate=9.0,
        tenant=("a=3:2:1", "b=1"), seed=4,
    )  # fmt: skip
    asks = list(RequestStream(load))
    assert asks == list(RequestStream(load)) and len({ask.parts[0] for ask in asks}) == 4
    assert 260 < sum(ask.tenant == "a" for ask in asks) < 340 and {a.weight for a in asks if a.tenant == "a"} == {2.0}
    assert RequestStream(load).rate == pytest.approx(9.0, rel=0.2) and all(42 <= ask.prompt_len <= 52 for ask in asks)
    assert asks[0].request("0", 50).params.max_tokens == max(1, min(5, 50 - asks[0].prompt_len))


def test_the_options_of_failures_and_limits() -> None:
    assert ClusterOptions(replicas=3, fail=("1.5:2", "7:0")).failures == ((1.5, 2), (7.0, 0))
    assert limits_of("ttft=500, itl=50") == {"ttft": 500.0, "itl": 50.0} and limits_of("") == {}
