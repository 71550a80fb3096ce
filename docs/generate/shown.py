"""What is measured and shown: Prometheus metrics, rows of figures, names of metrics in them."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Metric

from quire.engine.client import EngineInfo, Stats, StoreStats
from quire.engine.edge.metrics import EngineMetrics
from quire.figures.metrics import LIMITS, METRICS, PERCENTILES
from quire.figures.rows import fields
from quire.server.http.http_metrics import HttpMetrics
from quire.server.several.metrics import _States
from words import escaped, table

PROCESS = "process_"
EVERYTHING = Stats(
    bubbles=(0.0,), kv_store=StoreStats(), expert_pairs=(0,), accepted_per_pos=(0,), running_adapters=("a",)
)
"""Of an engine that has all that metrics are shown of."""


def every_metric() -> str:
    """Name, kind, labels and meaning, as the engine, HTTP and several models register them."""
    text = dict.fromkeys(
        ("model", "served_name", "folder", "backend", "isa", "dtype", "quantization", "kv_cache_dtype"), "x"
    )
    numbers = dict.fromkeys(
        ("vocab_size", "max_model_len", "block_size", "num_blocks", "kv_bytes_per_token", "weight_bytes",
         "max_num_queued_reqs", "load_seconds", "threads"), 1
    )  # fmt: skip
    made = EngineMetrics(EngineInfo(**text, **numbers, eos_token_ids=(), max_loras=1))  # type: ignore[arg-type]
    made.step(EVERYTHING)
    http = CollectorRegistry()
    HttpMetrics(http)
    engine = [family for family in made.registry.collect() if not family.name.startswith(PROCESS)]
    process = ", ".join(f"`{f.name}`" for f in made.registry.collect() if f.name.startswith(PROCESS))
    return (
        f"### Of an engine\n\n{_table(engine)}\n### Of HTTP\n\n{_table(http.collect())}\n"
        f"### Of several models\n\n{_table(_States(()).collect())}\n### Of the server's process\n\n"
        f"As prometheus-client has them: {process}.\n"
    )


def _table(families: Iterable[Metric]) -> str:
    rows = [(f"`{shown_name(f)}`", f.type, escaped(f.documentation)) for f in families]
    return table(("name", "kind", "meaning"), rows)


def shown_name(family: Metric) -> str:
    """As it is scraped: counters end in _total, histograms are _bucket, _sum and _count."""
    return family.name + {"counter": "_total", "histogram": "_bucket, _sum, _count"}.get(family.type, "")


def row_fields() -> str:
    """Fields of a row of figures."""
    return table(("field", "type", "meaning"), ((f"`{n}`", f"`{kind}`", escaped(text)) for n, kind, text in fields()))


def row_metrics() -> str:
    """Names of metrics in rows, percentiles of one quantity in one line, and limits of machines."""
    seen: dict[str, tuple[str, str, str, str]] = {}
    for name, metric in METRICS.items():
        stem, _, part = name.rpartition("_")
        grouped = part in PERCENTILES and stem.endswith("_ms")
        shown = f"`{stem}_`{{{', '.join(PERCENTILES)}}}" if grouped else f"`{name}`"
        told = metric.definition.partition(" of: ")[2] if grouped else metric.definition
        seen.setdefault(shown, (shown, metric.unit, metric.better, told))
    limits = ((f"`{name}`", m.unit, m.better, m.definition) for name, m in LIMITS.items())
    head = ("name", "unit", "better", "how it is computed")
    return f"{table(head, seen.values())}\nLimits of machines (`machine.limits`):\n\n{table(head, limits)}"
