"""One call that says what an engine would take and give: `predict(config, load, machine)`, in milliseconds of time.

The planner shows it, `quire tune` prunes by it, and the simulator takes its step times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import msgspec
from msgspec.structs import replace

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.exclusions.exclusion import Known
from quire.core.exclusions.features import GPU_PROCESSES
from quire.core.exclusions.table import check_known
from quire.model.known import known_of, known_of_device
from quire.model.own_drafts import with_own_drafts
from quire.plan.devices import DeviceSheet
from quire.plan.latency import Flow, StepBounds, batch_flow, steady_flow, stream_flow
from quire.plan.memory import PROCESS, MemoryAccount, account, choice_of, facts_of, kv_format, rank_needs
from quire.plan.planned_load import PlannedLoad, Slo
from quire.plan.rates import Calibration, DatasheetRates, MeasuredRates, Rates
from quire.plan.roofline import Roofline, critical_batch


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Prediction of one engine under one load: means in milliseconds, tokens and requests a second of all replicas.

    `sequences`: of the load's length that the KV cache holds at one time; `longest`: tokens of a sequence at most;
    `critical_batch`: rows from which arithmetic decides instead of reading weights; `capacity`: requests a second at
    most of a stream; `stable`: it is served as fast as it comes; `memory`: bytes of a rank. `kind` and `note` say where
    the rates come from.
    """

    ttft_ms: float
    tpot_ms: float
    e2e_ms: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    concurrency: float
    capacity: float
    stable: bool
    sequences: int
    longest: int
    critical_batch: float
    memory: dict[str, int]
    kind: str
    note: str

    def meets(self, slo: Slo) -> bool:
        """Whether the means are within the targets."""
        return self.stable and not (slo.ttft and self.ttft_ms > slo.ttft) and not (slo.itl and self.tpot_ms > slo.itl)


@dataclass(frozen=True)
class Machine:
    """Where an engine is to run: a named GPU, or (`device` None) this machine by its calibration."""

    device: DeviceSheet | None = None
    calibration: Calibration | None = None

    def rates(self, kv: str) -> Rates:
        """Rates of steps whose keys and values are kept in `kv`."""
        if self.device is not None:
            return DatasheetRates(self.device)
        if self.calibration is None:
            raise ConfigError("this machine is not calibrated; quire plan measures it once, or name a --device")
        return MeasuredRates(self.calibration, kv)


class Planner:
    """What is known of one engine before it is started. Options that do not fit are refused as at its start."""

    def __init__(self, config: EngineConfig, machine: Machine) -> None:
        config.validate()
        self.facts, self.bare = facts_of(config)
        self.choice = choice_of(config, machine.device)
        device = known_of_device(config, self.choice.backend, self.choice.chosen)
        config = with_own_drafts(config, self.facts, device)
        self.config, self.machine = config, machine
        known = known_of(config, self.facts) | device
        on_paper = Known(known.features - {GPU_PROCESSES}, known.words)  # devices that no process has to share
        check_known(config.features, on_paper)
        self.ranks = rank_needs(config, self.facts, self.choice)
        process = PROCESS if machine.calibration is None else machine.calibration.process
        self.account, self.kv = account(config, machine.device, self.ranks, self.choice, process)

    @cached_property
    def times(self) -> Roofline:
        """Predicted steps: the `StepTimes` of the simulator."""
        kept = kv_format(self.config, self.facts, self.choice)
        return Roofline(self.config, self.ranks, kept, self.machine.rates(kept.name))

    @property
    def kept(self) -> str:
        """The format of keys and values."""
        return kv_format(self.config, self.facts, self.choice).name

    @property
    def limits(self) -> StepBounds:
        """Limits of a step, whatever the memory holds."""
        limits = self.config.scheduler
        return StepBounds(limits.max_num_seqs, limits.rows(self.kv.max_model_len))

    def sequences(self, tokens: int) -> int:
        """Sequences of `tokens` tokens that the KV cache holds at one time, each with its recurrent state."""
        held, states = self.kv.blocks // max(1, self.kv.sizes.footprint(tokens)), self.kv.states
        return min(held, states.slots - 1) if states.slots else held

    def flow(self, load: PlannedLoad) -> Flow:
        """Flow of one replica, to which its part of the load goes. `ConfigError` for a request that never fits."""
        load, limits = self._of_a_replica(load)
        return (stream_flow if load.rate else batch_flow)(self.times, load, limits)

    def _of_a_replica(self, load: PlannedLoad) -> tuple[PlannedLoad, StepBounds]:
        """Part of the load that one replica is given, and the limits of its steps."""
        length = load.input + load.output
        if length > self.kv.max_model_len:
            raise ConfigError(
                f"--load input={load.input},output={load.output}: {length:,} tokens are more than the longest sequence "
                f"of {self.kv.max_model_len:,}; shorten it, or raise --max-model-len or the KV cache",
                param="load",
            )
        held = max(1, self.sequences(length))
        limits = StepBounds(min(self.limits.seqs, held), self.limits.tokens)
        replicas = self.config.parallel.data_parallel_size
        if load.rate:
            return replace(load, rate=load.rate / replicas), limits
        return replace(load, batch=-(-load.batch // replicas)), limits

    def predict(self, load: PlannedLoad) -> Prediction:
        """Latencies and throughput of `load`, and what there is room for."""
        flow, replicas = self.flow(load), self.config.parallel.data_parallel_size
        served = flow.requests_per_s * replicas
        rates = self.times.rates
        return Prediction(
            ttft_ms=flow.ttft * 1e3,
            tpot_ms=flow.tpot * 1e3,
            e2e_ms=flow.e2e * 1e3,
            requests_per_s=served,
            output_tokens_per_s=served * load.output,
            total_tokens_per_s=served * (load.input + load.output),
            concurrency=flow.concurrency * replicas,
            capacity=flow.capacity * replicas,
            stable=flow.stable,
            sequences=self.sequences(load.input + load.output),
            longest=self.kv.sizes.capacity(self.kv.blocks, self.facts.spec.max_length),
            critical_batch=critical_batch(self.times),
            memory=memory_of(self.account),
            kind=rates.kind,
            note=rates.note,
        )

    def rate_within(self, load: PlannedLoad, slo: Slo) -> float:
        """The most requests a second that one replica serves within the targets; 0: not even a lone one."""
        one = replace(load, rate=1e-6, batch=1)

        def held(rate: float) -> bool:
            part, limits = self._of_a_replica(replace(one, rate=rate * self.config.parallel.data_parallel_size))
            flow = steady_flow(self.times, part, part.rate, limits)
            if flow is None:
                return False
            return not (slo.ttft and flow.ttft * 1e3 > slo.ttft) and not (slo.itl and flow.tpot * 1e3 > slo.itl)

        low, high = 0.0, 1e-3
        while high < 1e7 and held(high):
            low, high = high, 2 * high
        for _ in range(12 if low else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if held(middle) else (low, middle)
        return low


def memory_of(found: MemoryAccount) -> dict[str, int]:
    """The account by name, `total` last."""
    fields = {"weights": found.weights, "drafts": found.drafts, "kv": found.kv, "tables": found.tables,
              "activations": found.activations, "pictures": found.images, "graphs": found.graphs,
              "process": found.process}  # fmt: skip
    return fields | {"total": found.total}


def predict(config: EngineConfig, load: PlannedLoad, machine: Machine) -> Prediction:
    """What an engine with `config` would take and give under `load` on `machine`.

    Milliseconds of time once the model's headers were read, which are kept. `ConfigError` where its start would refuse.
    """
    return Planner(config, machine).predict(load)


def devices_for(weights: int, memory: int) -> int:
    """Devices whose memory holds the weights alone."""
    return max(1, math.ceil(weights / memory))
