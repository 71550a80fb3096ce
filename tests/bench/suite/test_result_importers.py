"""Files of other tools become rows that say what their figures mean; what is none of them is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from paths import BENCHMARKS, DATA
from quire.bench.suite.imports.read import read_foreign
from quire.core.errors import ConfigError
from quire.figures.files import read_rows
from quire.figures.metric_definitions import METRICS
from quire.figures.schema import FigureRow

SAMPLES = DATA / "imports"
COMMITTED = BENCHMARKS / "suites" / "llm_inference_bench_sample.csv"


def rows_of(name: str) -> list[FigureRow]:
    return read_foreign(SAMPLES / name)


@pytest.mark.parametrize("path", [*sorted(SAMPLES.iterdir()), COMMITTED], ids=lambda path: path.name)
def test_every_sample_becomes_rows_of_known_metrics(path: Path) -> None:
    rows = read_foreign(path)
    assert rows
    for row in rows:
        assert row.kind == "imported" and row.metrics and row.metrics.keys() <= METRICS.keys()
        assert row.dialect.keys() <= row.metrics.keys()
        assert all(value >= 0 for value in row.metrics.values())


def test_llm_inference_bench_throughput_and_technique() -> None:
    off, on = rows_of("llm_inference_bench_kv_cache.csv")
    assert (off.technique, off.on, on.on) == ("kv-cache", False, True)
    assert (off.machine.devices, off.load.batch, off.load.input_len, off.load.output_len) == (2, 16, 128, 128)
    assert on.metrics == {
        "duration_s": 2.0,
        "e2e_ms_mean": 2000.0,
        "total_tokens_per_s": 2048.0,
        "output_tokens_per_s": 1024.0,
    }
    assert "batch" in on.dialect["total_tokens_per_s"]


def test_llm_inference_bench_keeps_watts_and_says_whose_latency() -> None:
    first, second = rows_of("llm_inference_bench_power.csv")  # the third has no figure
    assert (first.metrics["watts"], second.metrics["watts"]) == (230.0, 240.5)
    assert second.metrics["total_tokens_per_s"] == 128.0 and first.metrics["perplexity"] == 3.5
    [ttft] = rows_of("llm_inference_bench_ttft.csv")
    assert ttft.metrics == {"ttft_ms_mean": 2500.0} and "14.75 s" in ttft.notes[0]
    assert (ttft.load.input_len, ttft.load.output_len) == (1024, 1)


def test_vllm_serve_speaks_our_dialect() -> None:
    [row] = rows_of("vllm_serve.json")
    assert not row.dialect
    assert row.metrics["ttft_ms_p50"] == 110.25 and row.metrics["e2e_ms_p99"] == 2500.0
    assert row.metrics["failed"] == 2 and "goodput_per_s" not in row.metrics
    assert (row.load.arrivals, row.load.rate, row.load.requests) == ("poisson", 4.0, 100)
    assert (row.load.input_len, row.load.output_len) == (1000, 128)
    assert row.time == "2025-08-01T09:30:15"


def test_vllm_offline() -> None:
    [latency] = rows_of("vllm_latency.json")
    assert latency.metrics["e2e_ms_p50"] == 2000.0 and latency.samples["e2e_ms_p50"] == [1e3, 2e3, 3e3]
    assert "batch" in latency.dialect["e2e_ms_p50"]
    [throughput] = rows_of("vllm_throughput.json")
    assert throughput.metrics == {"duration_s": 20.0, "requests_per_s": 0.5, "total_tokens_per_s": 250.0}


def test_guidellm_names_its_own_tpot() -> None:
    closed, open_ = rows_of("guidellm.json")
    assert closed.metrics["tpot_ms_p50"] == 40.0 and closed.metrics["tpot_guidellm_ms_p50"] == 42.0
    assert closed.metrics["e2e_ms_p50"] == 5250.0 and closed.metrics["failed"] == 1
    assert "GuideLLM" in closed.dialect["tpot_guidellm_ms_p50"] and "GuideLLM" in closed.dialect["tpot_ms_p50"]
    assert (closed.load.batch, closed.load.arrivals, closed.load.input_len) == (8, "closed", 256)
    assert (open_.load.arrivals, open_.load.rate, open_.metrics) == ("poisson", 2.5, {"requests_per_s": 2.4})
    assert closed.model.name == "owner/model-7b"


def test_llama_bench_in_three_forms() -> None:
    prefill, decode = rows_of("llama_bench.json")
    assert prefill.metrics == {"prefill_tokens_per_s": 102.5} and prefill.samples["prefill_tokens_per_s"] == [
        102.0,
        103.0,
    ]
    assert (prefill.model.format, prefill.model.parameters, prefill.machine.name) == ("q4_k_m", 7615616512, "Some CPU")
    assert decode.metrics == {"decode_tokens_per_s": 11.5}
    assert (decode.machine.name, decode.load.input_len, decode.model.kv_format) == ("Some GPU", 512, "q8_0")
    [both] = rows_of("llama_bench.csv")
    assert both.metrics == {"total_tokens_per_s": 88.5} and both.options["n_threads"] == 2
    first, second = rows_of("llama_bench.md")
    assert (first.metrics, first.engine.commit) == ({"prefill_tokens_per_s": 102.5}, "abc1234")
    assert second.metrics == {"decode_tokens_per_s": 11.5} and second.load.name == "depth 512"
    assert first.model.parameters == 7620000000


def test_aiperf_in_both_forms() -> None:
    [row] = rows_of("aiperf.json")
    assert row.metrics["tpot_ms_p50"] == 34.73 and "itl_ms_p50" not in row.metrics
    assert "AIPerf" in row.dialect["tpot_ms_mean"] and row.metrics["duration_s"] == 12.14
    assert (row.load.batch, row.load.requests, row.model.name) == (2, 10, "owner/model-7b")
    [from_csv] = rows_of("aiperf.csv")
    assert from_csv.metrics["ttft_ms_mean"] == 1146.31 and from_csv.metrics["output_tokens_per_s"] == 261.25
    assert from_csv.load.requests == 40 and from_csv.load.output_len == 174.45


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "known are"),
        ("a,b\n1,2\n", "known are"),
        ("{}", "known are"),
        ('{"avg_latency": 1, "latencies": ["x"]}', "no list of seconds"),
        ('{"avg_latency": 1, "latencies": 3}', "no list of seconds"),
        ("Hardware,Framework,Model,Batch Size\na,b,c,1\n", "no lengths"),
        ("| model | test | t/s |\n|--|--|--|\n| a | what | 3 |\n", "says no test"),
        ('[{"n_prompt": 0, "n_gen": 0, "avg_ts": 1}]', "without tokens"),
        ('{"request_latency": {"unit": "h", "avg": 1}, "request_throughput": {}}', "is in 'h'"),
        ('{"request_latency": 1, "request_throughput": []}', "no metric"),
        ('{"benchmarks": [{"metrics": 3}, 4]}', "known are|no benchmarks"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_foreign(path)


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_foreign(tmp_path / "none.csv")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text"):
        read_foreign(tmp_path / "binary")
    with pytest.raises(ConfigError, match="directory"):
        read_foreign(tmp_path)


def test_the_command_adds_each_row_once(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from quire.cli.app import app

    out = tmp_path / "rows.jsonl"
    words = ["bench", "import", str(COMMITTED), str(SAMPLES / "vllm_serve.json"), "-o", str(out)]
    assert "14 rows of 2 files, 14 of them new" in CliRunner().invoke(app, words).output
    assert "14 rows of 2 files, 0 of them new" in CliRunner().invoke(app, words).output
    assert len(read_rows(out)) == 14
    pytest.importorskip("pyarrow")
    for source, made in ((out, tmp_path / "rows.parquet"), (tmp_path / "rows.parquet", tmp_path / "back.jsonl")):
        assert CliRunner().invoke(app, ["bench", "export", str(source), "-o", str(made)]).exit_code == 0
    assert read_rows(tmp_path / "back.jsonl") == read_rows(out)
