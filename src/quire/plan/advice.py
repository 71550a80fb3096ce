"""What to change first: each change predicted beside the plan, ranked by what it wins."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from quire.core.config import SECTIONS, EngineConfig
from quire.core.errors import QuireError
from quire.plan.planned_load import PlannedLoad, Slo
from quire.plan.predict import Planner, Prediction

LEAST = 1.03
"""A change is told from this gain on: less is within what predictions miss."""


@dataclass(frozen=True)
class OptionChange:
    """Options by name that would be other, how many times as good each figure is then, and sequences more that fit.

    `meets`: whether the targets are met with it.
    """

    options: dict[str, Any]
    throughput: float
    ttft: float
    tpot: float
    sequences: int
    meets: bool
    cost: str = ""

    @property
    def score(self) -> float:
        """Throughput, and the latencies at half its weight."""
        return math.log(self.throughput) + 0.5 * (math.log(self.ttft) + math.log(self.tpot))

    def text(self) -> str:
        """The change as it is shown."""
        flags = " ".join(_flag(name, value) for name, value in self.options.items())
        gains = [f"{name} x{gain:.2f}" for name, gain in
                 (("throughput", self.throughput), ("first token", self.ttft), ("decode", self.tpot))
                 if gain >= LEAST or gain <= 1 / LEAST]  # fmt: skip
        if self.sequences:
            gains.append(f"{self.sequences:+,} sequences fit")
        return f"{flags}: {', '.join(gains)}{'; meets the targets' if self.meets else ''}{self.cost}"


def advice(planner: Planner, load: PlannedLoad, slo: Slo, most: int = 6) -> list[OptionChange]:
    """The best changes of one option each, those that meet targets which the plan misses first."""
    now = planner.predict(load)
    found = []
    for options, cost in _candidates(planner):
        try:
            then = Planner(with_options(planner.config, options), planner.machine).predict(load)
        except QuireError:
            continue  # this model or machine cannot
        change = _change(options, cost, now, then, met=then.meets(slo) and not now.meets(slo))
        if change.meets or change.score > math.log(LEAST) or (change.sequences > 0 and change.score > -0.02):
            found.append(change)
    return sorted(found, key=lambda change: (not change.meets, -change.score, -change.sequences))[:most]


def with_options(config: EngineConfig, options: dict[str, Any]) -> EngineConfig:
    """`config` with other values of some options, by their flat names."""
    for name, value in options.items():
        section = next(s for s, struct in SECTIONS.items() if name in struct.__struct_fields__)
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def _change(options: dict[str, Any], cost: str, now: Prediction, then: Prediction, met: bool) -> OptionChange:
    stream = now.capacity or then.capacity
    before, after = (p.capacity if stream else p.output_tokens_per_s for p in (now, then))
    return OptionChange(
        options, _ratio(after, before), _ratio(now.ttft_ms, then.ttft_ms), _ratio(now.tpot_ms, then.tpot_ms),
        then.sequences - now.sequences, met, cost,
    )  # fmt: skip


def _ratio(better: float, than: float) -> float:
    return better / than if better > 0 and than > 0 else 1.0


def _candidates(planner: Planner) -> Iterator[tuple[dict[str, Any], str]]:
    """Changes worth a look, and what each costs beside."""
    config, found = planner.config, planner.facts
    model, limits, gpu = config.model, config.scheduler, planner.choice.backend == "triton"
    rounded = "; measure what it costs in quality (quire eval)"
    if not found.stored and found.matrix_bits == 0:
        for form in ("int8", "int4"):
            if model.quantization != form:
                yield {"quantization": form}, rounded
        if model.quantization in (None, "none") and planner.choice.backend == "cpu" and config.device.bf16_bits == 16:
            yield {"bf16_bits": 12}, "; the same bits"
    for kept in ("int8", "fp8") if gpu else ("int8",):
        if config.cache.kv_cache_dtype != kept:
            yield {"kv_cache_dtype": kept}, rounded
    for factor in (2, 4):
        seqs = limits.max_num_seqs * factor
        tokens = max(limits.max_num_batched_tokens, seqs)
        more = {} if tokens == limits.max_num_batched_tokens else {"max_num_batched_tokens": tokens}
        yield {"max_num_seqs": seqs} | more, ""
    for tokens in (limits.max_num_batched_tokens * 2, limits.max_num_batched_tokens // 2):
        if tokens >= limits.max_num_seqs:
            yield {"max_num_batched_tokens": tokens}, ""
    if planner.machine.device is not None and planner.machine.device.links:
        ranks = config.parallel.tensor_parallel_size * 2
        yield {"tensor_parallel_size": ranks}, f"; {ranks} devices instead of {ranks // 2}"


def _flag(name: str, value: Any) -> str:
    return f"--{name.replace('_', '-')} {value}"
