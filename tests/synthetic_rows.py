"""Rows that nobody measured, for tests of what is shown: their numbers follow from their names."""

from __future__ import annotations

from typing import Any

from quire.figures.schema import FigureRow, Kind, RowEngine, RowLoad, RowMachine, RowModel
from quire.figures.statistics import interval, median

LIMITS = {"read_bytes_per_s": 20e9, "bf16_flops_per_s": 1e12, "int8_ops_per_s": 2e12}
NASTY = "</script><img src=x onerror=alert(1)>\"'&\u2028"
"""A name that breaks out of pages that are made carelessly."""


def rounds(middle: float, spread: float = 0.01, count: int = 7) -> list[float]:
    """Values around a median."""
    return [middle * (1 + spread * (i - count // 2)) for i in range(count)]


def synthetic(
    speed: float, *, kind: Kind = "measured", batch: int = 1, fmt: str = "bfloat16", metrics: Any = None, **more: Any
) -> FigureRow:
    """A row of `speed` output tokens a second; of what was measured with 7 rounds."""
    samples = {"output_tokens_per_s": rounds(speed), "tpot_ms_p50": rounds(1000 * batch / speed)}
    samples |= {"ttft_ms_p50": rounds(100.0 / speed)}
    facts: dict[str, Any] = {
        "benchmark": "latency",
        "suite": "synthetic",
        "machine": RowMachine(name="no machine", cores=2, limits=LIMITS),
        "engine": RowEngine(name="quire", version="0"),
        "model": RowModel(name="nobody/model", parameters=1_000_000_000, format=fmt, kv_format="bfloat16"),
        "load": RowLoad(batch=batch, requests=batch, input_len=128, output_len=64, arrivals="closed"),
        "command": f"quire bench latency --batch-size {batch}",
        "time": "2026-01-02T03:04:05Z",
    }
    own = {name: median(values) for name, values in samples.items()} | (metrics or {})
    if kind != "measured":
        return FigureRow(kind=kind, metrics=own, **(facts | more))
    intervals = {name: interval(values) for name, values in samples.items()}
    return FigureRow(kind=kind, metrics=own, intervals=intervals, samples=samples, **(facts | more))


def suite(faster: float = 1.0) -> list[FigureRow]:
    """Two formats at four batches, a technique on and off, quality, and rows of others."""
    rows = [
        synthetic(faster * speed * batch**0.8, batch=batch, fmt=fmt, metrics={"weight_bytes": weights})
        for fmt, speed, weights in (("bfloat16", 10.0, 2e9), ("int8", 18.0, 1e9))
        for batch in (1, 2, 4, 8)
    ]
    for on, speed in ((True, 40.0), (False, 20.0)):
        claim = "2-3x, as its authors say"
        options = {"enable_prefix_caching": on}
        rows.append(synthetic(faster * speed, technique="prefix-cache", on=on, claim=claim, options=options))
    for fmt, perplexity in (("bfloat16", 8.0), ("int8", 8.1)):
        rows.append(synthetic(1.0, benchmark="quality", load=RowLoad(), fmt=fmt, metrics={"perplexity": perplexity}))
    others = {
        "engine": RowEngine(name="vllm", version="1"),
        "machine": RowMachine(name="A100", devices=2),
        "command": "",
    }
    rows += [synthetic(500.0 * batch, kind="imported", batch=batch, **others) for batch in (1, 8)]
    rows.append(synthetic(11.0, kind="predicted", command="quire plan"))
    return rows
