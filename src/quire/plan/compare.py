"""A load on several devices: how many of each serve it within its targets, what that costs, and which is cheapest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.core.config import EngineConfig
from quire.core.errors import QuireError
from quire.plan.devices import DeviceSheet
from quire.plan.planned_load import PlannedLoad, Slo
from quire.plan.predict import Machine, Prediction
from quire.plan.sizing import Cost, cost_of, fitted, size


@dataclass(frozen=True)
class DeviceOffer:
    """What `count` devices of one kind would do for a load. `count` 0: none serve it, for the reason `why`.

    `cost`: None where no price is known.
    """

    device: DeviceSheet
    count: int
    ranks: int
    prediction: Prediction | None
    cost: Cost | None
    why: str = ""

    @property
    def order(self) -> tuple[int, float, float]:
        """What offers are sorted by: those that serve and have a price by that, then by their throughput."""
        rank = 2 if not self.count else 0 if self.cost is not None else 1
        speed = 0.0 if self.prediction is None else self.prediction.output_tokens_per_s
        return rank, 0.0 if self.cost is None else self.cost.hour, -speed


def compare_devices(
    config: EngineConfig,
    devices: Sequence[DeviceSheet],
    load: PlannedLoad,
    slo: Slo,
    tell: Callable[[str], None] = lambda name: None,
) -> list[DeviceOffer]:
    """Offers of all `devices`, the cheapest that serves the load first. `tell` hears of each device."""
    found = []
    for device in devices:
        tell(device.name)
        found.append(offer_of(config, device, load, slo))
    return sorted(found, key=lambda offer: offer.order)


def offer_of(config: EngineConfig, device: DeviceSheet, load: PlannedLoad, slo: Slo) -> DeviceOffer:
    """What devices of one kind would do; what cannot be is said in `why`."""
    try:
        planner = fitted(config, Machine(device), load)
        sizing, prediction = size(planner, load, slo), planner.predict(load)
    except QuireError as error:
        return DeviceOffer(device, 0, 0, None, None, error.message)
    if not sizing.replicas:
        missed = [
            f"{name} {found:,.0f} ms"
            for name, found, most in (
                ("first token", prediction.ttft_ms, slo.ttft),
                ("between tokens", prediction.tpot_ms, slo.itl),
            )
            if most and found > most
        ]
        return DeviceOffer(device, 0, sizing.ranks, prediction, None, f"misses the targets: {', '.join(missed)}")
    served = load.rate or prediction.requests_per_s
    cost = cost_of(sizing.devices, device.hour, served, load.output) if device.hour else None
    return DeviceOffer(device, sizing.devices, sizing.ranks, prediction, cost)
