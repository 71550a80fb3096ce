"""What is measured and shown: Prometheus metrics, rows of figures, names of metrics in them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from prometheus_client import Metric

from quire.engine.client import EngineInfo
from quire.engine.frontend.metrics import EngineMetrics
from quire.engine.stats import ReplicaStats, Stats, StoreStats
from quire.figures.metrics import LIMITS, METRICS, PERCENTILES
from quire.figures.schema import fields
from quire.server.http.metrics import HttpMetrics
from quire.server.models.metrics import ModelStates
from words import escaped, table

PROCESS = "process_"
EVERYTHING = Stats(
    bubbles=(0.0,),
    kv_store=StoreStats(),
    expert_pairs=(0,),
    accepted_per_pos=(0,),
    running_adapters=("a",),
    replicas=(ReplicaStats(),),
)
"""Of an engine that has all that metrics are shown of."""


def every_metric() -> str:
    """Name, kind, labels and meaning, as the engine, HTTP and the models of a server register them."""
    made = EngineMetrics(some_engine())
    made.step(EVERYTHING)
    engine = [family for family in made.registry.collect() if not family.name.startswith(PROCESS)]
    process = ", ".join(f"`{f.name}`" for f in made.registry.collect() if f.name.startswith(PROCESS))
    return (
        f"### Of an engine\n\n{_table(engine)}\n### Of HTTP\n\n{_table(HttpMetrics().registry.collect())}\n"
        f"### Of the states of models\n\n{_table(ModelStates(()).collect())}\n### Of the server's process\n\n"
        f"As prometheus-client has them: {process}.\n"
    )


def some_engine() -> EngineInfo:
    """Facts of no engine, with room for adapters, that takes pictures."""
    plain = {str: "x", int: 1, float: 1.0}
    given = {f.name: plain.get(f.type, ()) for f in msgspec.structs.fields(EngineInfo) if f.required}
    return EngineInfo(**given, max_loras=1, pictures=True)  # type: ignore[arg-type]


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
