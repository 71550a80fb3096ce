"""Which of two configurations is better: one number of what was found, or is predicted, of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.plan.planned_load import Slo

Found = Mapping[str, float]
"""Figures by names of METRICS."""
METRICS = {
    "throughput": "output_tokens_per_s",
    "goodput": "goodput_per_s",
    "itl": "tpot_ms",
    "ttft": "ttft_ms",
    "e2e": "e2e_ms",
}
"""Objective -> metric; milliseconds without their percentile."""


@dataclass(frozen=True)
class Objective:
    """The highest throughput or goodput, or the lowest latency, within `slo`; latencies are taken `at` a percentile.

    A target for ITL bounds TPOT, as in `quire plan`: the mean gap of each request.
    """

    name: str
    slo: Slo
    at: str = "mean"

    @property
    def metric(self) -> str:
        """What is to be best."""
        found = METRICS[self.name]
        return f"{found}_{self.at}" if found.endswith("_ms") else found

    @property
    def rises(self) -> bool:
        """Whether more of it is better."""
        return self.name in ("throughput", "goodput")

    @property
    def targets(self) -> dict[str, float]:
        """Metric -> most milliseconds."""
        pairs = ((f"ttft_ms_{self.at}", self.slo.ttft), (f"tpot_ms_{self.at}", self.slo.itl))
        return {name: limit for name, limit in pairs if limit}

    @property
    def of_requests(self) -> dict[str, float]:
        """The objective as targets of each request, which goodput counts."""
        return {n: limit for n, limit in (("ttft", self.slo.ttft), ("tpot", self.slo.itl)) if limit}

    def excess(self, found: Found) -> float:
        """The largest share of a target that is taken: above 1, it is missed. Goodput has its targets within."""
        if self.name == "goodput":
            return 0.0
        return max((found[name] / limit for name, limit in self.targets.items()), default=0.0)

    def meets(self, found: Found) -> bool:
        """Whether all targets are kept."""
        return self.excess(found) <= 1

    def value(self, found: Found) -> float:
        """More is better, above 0: of configurations that meet the targets, and to compare by ratios."""
        return found[self.metric] if self.rises else 1 / max(found[self.metric], 1e-9)

    def score(self, found: Found) -> float:
        """More is better: below 0 where a target is missed, by how far."""
        return self.value(found) if self.meets(found) else -self.excess(found)
