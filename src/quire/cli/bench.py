"""`quire bench`: measurements of a model or a server, and rows of figures."""

from __future__ import annotations

from quire.cli.group import LazyGroup, Listed

COMMANDS = {
    "suite": Listed(
        "quire.cli.suite:suite",
        "Measure models, formats, techniques, loads and engines in turns; run again, it goes on where it was.",
    ),
    "import": Listed(
        "quire.cli.suite:imported",
        "Rows from files of LLM-Inference-Bench, vLLM's benchmarks, GuideLLM, llama-bench or AIPerf.",
    ),
    "export": Listed("quire.cli.suite:export", "Rows as a Parquet file for other tools, or back as JSON lines."),
    "latency": Listed(
        "quire.cli.measure:latency", "Latency of one batch at a time: TTFT, TPOT, ITL, tokens per second."
    ),
    "throughput": Listed(
        "quire.cli.measure:throughput",
        "Throughput of many requests at once, and how much of the KV cache is wasted.",
    ),
    "serve": Listed(
        "quire.cli.measure:serve",
        "Load on a running server over HTTP, streaming, with latencies as its clients see them.",
    ),
}

bench = LazyGroup(COMMANDS, name="bench", help="Measure latency, throughput, or a server under load.")
