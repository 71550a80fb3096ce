"""LLM-Inference-Bench (Chitty-Venkata et al. 2024, argonne-lcf/LLM-Inference-Bench): the CSV files of its dashboard.

Columns: Hardware, Num of Hardware, Framework, Model, `Input Output Length` (one number for both) or `Input Length` and
`Output Length`, Batch Size, Latency (seconds of the batch), Throughput, and by file: TTFT Latency, end_latency,
avg_power (mW or W), Perplexity, KV Cache, KV Cache Dtype, KV Cache Block_size, speculative model,
num speculative tokens, speculative_decoding.
"""

from __future__ import annotations

import re

from quire.bench.suite.imports.common import count, made, number, read_csv
from quire.core.errors import ConfigError
from quire.figures.schema import FigureRow, RowEngine, RowLoad, RowMachine, RowModel

NEEDED = ("Hardware", "Framework", "Model", "Batch Size")
MILLIWATTS = 5000.0
"""Power above is in milliwatts, as NVML gives it and some of the files keep it: no device of theirs takes 5 kW."""
DIALECT = {
    "total_tokens_per_s": "batch x (input + output tokens) / latency of the batch",
    "duration_s": "latency of one batch, start to end",
    "e2e": "latency of one batch: all of its requests end together",
    "ttft": "time of generating one token with the same prompts",
    "watts": "mean over the run and over all devices together",
    "perplexity": "as the suite measured it, on LongBench",
}


def knows(text: str) -> bool:
    """Whether a file begins as those do."""
    names = [name.strip() for name in text.partition("\n")[0].split(",")]
    return all(name in names for name in NEEDED)


def read(text: str, where: str) -> list[FigureRow]:
    """Rows; those without any figure are left out. `ConfigError` names a line without lengths or batch."""
    rows = []
    for line, found in enumerate(read_csv(text, where), 2):
        both = found.get("Input Output Length", "")
        reads, writes = (number(found.get(name, "") or both) for name in ("Input Length", "Output Length"))
        batch = number(found.get("Batch Size", ""))
        if reads is None or writes is None or batch is None:
            raise ConfigError(f"{where}, row {line}: no lengths or no batch size in it")
        if metrics := _metrics(found, reads, writes, batch):
            rows.append(
                _row(found, metrics, RowLoad(requests=int(batch), batch=int(batch), input_len=reads, output_len=writes))
            )
    return rows


def _row(found: dict[str, str], metrics: dict[str, float], load: RowLoad) -> FigureRow:
    """One row of the table: the technique that its file is about becomes the row's."""
    options: dict[str, str | int | float | bool] = {}
    technique, on, kv = "", True, ""
    if "KV Cache" in found:
        technique, on = "kv-cache", not found["KV Cache"].lower().startswith("without")
    if "speculative_decoding" in found:
        technique, on = "draft", not found["speculative_decoding"].lower().startswith("without")
        drafter = found.get("speculative model", "None")
        if drafter not in ("", "None"):
            options |= {
                "speculative_model": drafter,
                "num_speculative_tokens": count(found.get("num speculative tokens")),
            }
    if size := found.get("KV Cache Block_size"):
        options["block_size"] = count(size)
    stored = re.search(r"Weight\s*=\s*(\w+).*KV Cache\s*=\s*(\w+)", found.get("KV Cache Dtype", ""))
    weights, kv = stored.groups() if stored else ("", "")
    devices, notes = count(found.get("Num of Hardware"), 1), []
    if (end := number(found.get("end_latency"))) is not None:
        notes = [f"end_latency {end:g} s: of another run, with as many output as input tokens"]
    return made(
        "llm-inference-bench",
        metrics=metrics,
        engine=RowEngine(name=found["Framework"]),
        model=RowModel(name=found["Model"], format=weights, kv_format=kv),
        load=load,
        machine=RowMachine(name=found["Hardware"], devices=devices),
        dialect=DIALECT,
        technique=technique,
        on=on,
        options=options,
        notes=notes,
    )


def _metrics(found: dict[str, str], reads: float, writes: float, batch: float) -> dict[str, float]:
    metrics: dict[str, float] = {}
    names = ("Latency", "Throughput", "TTFT Latency", "avg_power")
    seconds, rate, first, power = (number(found.get(name)) for name in names)
    if rate is None and seconds:
        rate = batch * (reads + writes) / seconds
    if first is not None:
        metrics["ttft_ms_mean"] = 1e3 * first
    if seconds:
        metrics |= {"duration_s": seconds, "e2e_ms_mean": 1e3 * seconds}
    if rate is not None:
        metrics["total_tokens_per_s"] = rate
        metrics["output_tokens_per_s"] = rate * writes / (reads + writes)
    if power is not None:
        metrics["watts"] = power / 1e3 if power > MILLIWATTS else power
    if (perplexity := number(found.get("Perplexity"))) is not None:
        metrics["perplexity"] = perplexity
    return metrics
