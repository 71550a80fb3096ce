"""The way from options to a cluster: what each replica holds and how long its steps take, from headers or from a
file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.cache.tiers import StoreSizes
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.exclusions.exclusion import Known
from quire.core.exclusions.features import SIMULATION
from quire.core.exclusions.table import check_known
from quire.plan.devices import device_of
from quire.plan.memory import choice_of
from quire.plan.predict import Machine, Planner
from quire.plan.rates import PlannedChunk, StepTimes, machine_key, recall
from quire.simulate.replica import Setup
from quire.simulate.scaling import Autoscale
from quire.simulate.simulate_options import ClusterOptions
from quire.simulate.step_times import InterpolatedTimes, read_table
from quire.simulate.store import SimulatedLink
from quire.simulate.timeline import Design

MOST_BLOCKS = 1 << 26
"""Of all replicas together: each takes some 100 bytes of this machine's memory."""


@dataclass(frozen=True)
class TimedDesign:
    """A design, and where its step times come from: "predicted" by a datasheet or calibration, or "measured"."""

    design: Design
    device: str
    devices: int
    memory: int
    kv_format: str
    cells: int
    notes: tuple[str, ...]


class _Scaled:
    """Steps that take so many times as long."""

    def __init__(self, times: StepTimes, factor: float) -> None:
        self._times, self._factor = times, factor

    def seconds(self, chunks: Sequence[PlannedChunk]) -> float:
        """Seconds of one step."""
        return self._times.seconds(chunks) * self._factor


def design_of(config: EngineConfig, options: ClusterOptions, seed: int) -> TimedDesign:
    """The cluster that `options` name, of engines with `config`. `ConfigError` for what cannot be."""
    options.validate()
    check_known(config.features, Known(frozenset({SIMULATION})))
    planner = Planner(config, _machine(config, options.device))
    kv, notes = planner.kv, list(planner.facts.notes)
    times: StepTimes
    if options.step_times:
        times = read_table(Path(options.step_times))
        notes.append(f"step times: measured, {options.step_times}")
    else:
        rates = planner.times.rates
        times = InterpolatedTimes(planner.times)
        notes.append(f"step times: {rates.kind}, {rates.note}")
    if options.step_scale != 1:
        times = InterpolatedTimes(_Scaled(times, options.step_scale))
    bounds = options.bounds
    count = bounds[1] if bounds else options.replicas
    if kv.blocks * count > MOST_BLOCKS:
        raise ConfigError(
            f"{count} replicas of {kv.blocks:,} KV blocks are more than {MOST_BLOCKS:,} blocks in all; --block-size "
            "128 makes them fewer, --num-blocks names a number",
            param="num_blocks",
        )
    setup = Setup(
        config.scheduler, kv.blocks, config.cache.block_size, kv.max_model_len,
        config.cache.enable_prefix_caching, kv.sizes.windows, kv.states,
    )  # fmt: skip
    link = _link(options, StoreSizes(kv.block_bytes, kv.states.slot_bytes))
    design = Design(
        setup=setup, times=times, replicas=count, router=options.router, prefill=options.prefill_replicas,
        link=link, mtbf=options.mtbf, failures=options.failures, start=options.start_time,
        autoscale=_scaling(options, bounds), patience=options.patience, edge_ms=options.edge_ms,
        sample=options.sample_every, seed=seed,
    )  # fmt: skip
    named = planner.machine.device
    return TimedDesign(
        design, "" if named is None else named.name, count * config.parallel.ranks,
        0 if named is None else named.memory, config.cache.kv_cache_dtype, options.cells,
        tuple(notes),
    )  # fmt: skip


def _machine(config: EngineConfig, device: str) -> Machine:
    named = device_of(device)
    if named is not None:
        return Machine(named)
    choice = choice_of(config, None)
    return Machine(None, recall(machine_key(choice.isa, choice.threads)))


def _link(options: ClusterOptions, sizes: StoreSizes) -> SimulatedLink | None:
    if not options.prefill_replicas:
        return None
    return SimulatedLink(sizes, options.link_gb_s * 1e9, options.link_ms / 1000)


def _scaling(options: ClusterOptions, bounds: tuple[int, int] | None) -> Autoscale | None:
    if bounds is None:
        return None
    rule = Autoscale(
        low=bounds[0], high=bounds[1], metric=options.scale_metric, target=options.scale_target,
        every=options.scale_every, down_after=options.scale_down_after,
    )  # fmt: skip
    rule.validate()
    return rule
