"""What `quire plan` can be told, and the load that it plans for if it is told none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from quire.core.options.fields import about
from quire.plan.devices import KINDS, THIS

if TYPE_CHECKING:
    from quire.core.config import EngineConfig
    from quire.plan.planned_load import PlannedLoad


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is planned for. `price`: of one device for an hour, in any currency; 0: no cost is said."""

    device: Annotated[
        str,
        about(
            f"Where it is to run: {THIS} machine, or one by its data sheet, as h100, rtx-4090, m4-max or c7i.8xlarge; "
            "docs/plan lists them."
        ),
    ] = THIS
    devices: Annotated[
        str,
        about(
            "Compare devices, the cheapest that serves the load within its targets first: all, or names and kinds "
            f"({', '.join(KINDS)}) with commas between them."
        ),
    ] = ""
    memory_gb: Annotated[float, about("An own device, or other figures of the --device: its memory in GB.", ge=0)] = 0.0
    bandwidth_gbs: Annotated[float, about("Its memory bandwidth in GB/s.", ge=0)] = 0.0
    tflops: Annotated[float, about("Its dense arithmetic on 16-bit numbers, in 10^12 a second.", ge=0)] = 0.0
    prices: Annotated[str, about("With --devices: prices of an hour in place of those known, as h100=2.5,l4=0.7.")] = ""
    load: Annotated[
        str,
        about(
            "What is asked of it: rate=2,input=512,output=128 (requests a second), or batch=8,...; one request if not "
            "given."
        ),
    ] = ""
    slo: Annotated[str, about("Targets in milliseconds, as means: ttft=200,itl=50.")] = ""
    price: Annotated[float, about("Price of one device for an hour; without it no cost is said.")] = 0.0
    calibrate: Annotated[bool, about("Measure this machine anew (some 30 s) instead of recalling it.")] = False


def usual_load(engine: EngineConfig) -> PlannedLoad:
    """One request, short enough for the model."""
    from quire.plan.memory import facts_of
    from quire.plan.planned_load import PlannedLoad

    longest = engine.model.max_model_len or facts_of(engine)[0].spec.max_position
    return PlannedLoad(input=max(1, min(512, longest // 2)), output=max(1, min(128, longest // 4)))
