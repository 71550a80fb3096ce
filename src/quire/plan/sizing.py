"""How many devices a load needs, and what they cost at that load."""

from __future__ import annotations

import math
from dataclasses import dataclass

from msgspec.structs import replace

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, QuireError
from quire.core.parallel import MOST_RANKS
from quire.plan.planned_load import PlannedLoad, Slo
from quire.plan.predict import Machine, Planner, devices_for
from quire.plan.weights import weight_parts

HOUR = 3600.0


@dataclass(frozen=True)
class Sizing:
    """`weights_alone`: devices whose memory holds the weights and nothing else. `ranks` devices make an engine that has
    room for a sequence of the load; `replicas` of it serve the load within the targets, 0: no number does, as a lone
    request misses them. `rate`: requests a second that one replica serves so.
    """

    weights_alone: int
    ranks: int
    replicas: int
    rate: float

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.ranks * self.replicas


def size(planner: Planner, load: PlannedLoad, slo: Slo) -> Sizing:
    """Size of the planner's engine, as many ranks as it has; `fitted` finds these."""
    parallel, device = planner.config.parallel, planner.machine.device
    one = Planner(
        replace(planner.config, parallel=replace(parallel, data_parallel_size=1, prefill_replicas=0)), planner.machine
    )
    whole = sum(part.nbytes for part in weight_parts(planner.config, planner.facts, planner.choice))
    memory = one.account.there if device is None else device.memory
    if not load.rate:
        met = one.predict(load).meets(slo)
        return Sizing(devices_for(whole, memory), parallel.ranks, int(met), 0.0)
    rate = one.rate_within(load, slo)
    return Sizing(devices_for(whole, memory), parallel.ranks, math.ceil(load.rate / rate) if rate else 0, rate)


def fitted(config: EngineConfig, machine: Machine, load: PlannedLoad) -> Planner:
    """A planner whose engine has room for a sequence of the load: with as many ranks of tensor parallelism, a power of
    two, as that takes on a named device, unless `config` says how many. The error of the first where none has.
    """
    sizes = [config.parallel.tensor_parallel_size]
    if machine.device is not None and machine.device.links and config.parallel.ranks == 1:
        sizes = [1 << i for i in range(MOST_RANKS.bit_length())]
    first: QuireError | None = None
    for ranks in sizes:
        try:
            planner = Planner(replace(config, parallel=replace(config.parallel, tensor_parallel_size=ranks)), machine)
            if planner.sequences(min(load.input + load.output, planner.kv.max_model_len)):
                planner.flow(replace(load, batch=1, rate=0.0))
                return planner
        except QuireError as error:
            first = first or error
    if first is not None:
        raise first
    raise ConfigError("--load: no number of ranks has room for one of its sequences", param="load")


@dataclass(frozen=True)
class Cost:
    """Cost of the load as it is offered, in the currency of the price: idle time of the devices is paid, too."""

    hour: float
    request: float
    million_tokens: float


def cost_of(devices: int, price: float, requests_per_s: float, output: int) -> Cost:
    """`price` of a device for an hour; tokens are those of answers. `ConfigError` for a price that is none."""
    if not price > 0:
        raise ConfigError(f"--price {price:g}: must be above 0, of one device for an hour", param="price")
    hour = devices * price
    request = hour / HOUR / requests_per_s if requests_per_s else math.inf
    return Cost(hour, request, request / output * 1e6)
