"""The text that Prometheus scrapes: metrics of HTTP, of all engines that are loaded, and of the states of models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from quire.server.models.pool import STATES, PooledModel


def render(registries: Iterable[CollectorRegistry], models: Iterable[PooledModel]) -> bytes:
    """The metrics of all `registries`, and the states of `models`."""
    states = CollectorRegistry()
    states.register(ModelStates(tuple(models)))
    merged = _Merged((*registries, states))
    return generate_latest(cast(CollectorRegistry, merged))


class _Merged(Collector):
    """The metrics of several registries, one family for each name. A sample that all have, as the process's, is there
    once."""

    def __init__(self, registries: tuple[CollectorRegistry, ...]) -> None:
        self._registries = registries

    def collect(self) -> Iterable[Metric]:
        """The metric families of this moment."""
        found: dict[str, Metric] = {}
        seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
        for registry in self._registries:
            for family in registry.collect():
                merged = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    key = (sample.name, tuple(sorted(sample.labels.items())))
                    if key not in seen:
                        seen.add(key)
                        merged.samples.append(sample)
        return found.values()


class ModelStates(Collector):
    """Which model is in which state, and how often it was loaded."""

    def __init__(self, models: tuple[PooledModel, ...]) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        """The metric families of this moment."""
        states = GaugeMetricFamily("quire:model_state", "1 = the model's state.", labels=["model_name", "state"])
        loads = CounterMetricFamily("quire:model_loads", "Times that a model was loaded.", labels=["model_name"])
        needed = GaugeMetricFamily(
            "quire:model_needed_bytes", "Bytes that a loaded model takes.", labels=["model_name"]
        )
        for model in self._models:
            name = model.entry.name
            for state in STATES:
                states.add_metric([name, state], float(model.state == state))
            loads.add_metric([name], model.loads)
            needed.add_metric([name], model.entry.needed_bytes)
        return (states, loads, needed)
