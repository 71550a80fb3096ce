"""When requests are due: seconds from the start, the same for the same seed.

All open loops are one process of unit rate, whose times are mapped through the inverse of the mean number of
arrivals: gamma-distributed gaps of mean 1 (their shape is vLLM's `burstiness`, 1 = Poisson), or exactly 1. A ramp is
thus a non-homogeneous process (Cinlar's time rescaling), whose mean rate goes from one to the other in time.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

from quire.bench.loads import ServeLoad
from quire.core.errors import ConfigError
from quire.core.options.values import check_values


def kind_of(load: ServeLoad) -> str:
    """The arrivals that `load` names or implies. `ConfigError` where it lacks what they need."""
    check_values(load)
    kind = load.arrivals or _implied(load)
    if kind in ("constant", "poisson", "gamma") and math.isinf(load.request_rate) and not load.sweep:
        raise ConfigError(f"--arrivals {kind} needs --request-rate", param="request_rate")
    if kind in ("at-once", "closed") and not math.isinf(load.request_rate):
        raise ConfigError(f"--request-rate {load.request_rate:g}: arrivals {kind} have none", param="request_rate")
    if kind in ("constant", "poisson") and load.burstiness != 1:
        raise ConfigError(f"--burstiness {load.burstiness:g}: arrivals {kind} have their own; name gamma")
    if kind == "closed" and not load.max_concurrency and not load.sweep:
        raise ConfigError("--arrivals closed needs --max-concurrency", param="max_concurrency")
    if kind == "ramp" and load.ramp_up_end_rps == load.ramp_up_start_rps == 0:
        raise ConfigError("--arrivals ramp needs --ramp-up-start-rps and --ramp-up-end-rps", param="ramp_up_end_rps")
    if kind == "ramp" and load.ramp_up_strategy == "exponential" and not load.ramp_up_start_rps * load.ramp_up_end_rps:
        raise ConfigError("--ramp-up-strategy exponential: no rate grows from 0 or shrinks to it")
    if kind != "ramp" and load.ramp_up_end_rps + load.ramp_up_start_rps:
        raise ConfigError(f"--ramp-up-end-rps: arrivals are {kind}; leave --arrivals out, or name ramp")
    if kind == "trace" and not load.trace:
        raise ConfigError("--arrivals trace needs --trace FILE", param="trace")
    return kind


def _implied(load: ServeLoad) -> str:
    if load.ramp_up_end_rps or load.ramp_up_start_rps:
        return "ramp"
    if not math.isinf(load.request_rate):
        return "poisson" if load.burstiness == 1 else "gamma"
    if load.trace and not load.sweep:
        return "trace"
    return "closed" if load.max_concurrency else "at-once"


def due_times(load: ServeLoad, count: int, traced: Sequence[float] = ()) -> list[float]:
    """Seconds from the start at which `count` requests are due, the first at 0; `traced`: when they came in a trace."""
    kind = kind_of(load)
    if kind == "trace":
        return [(at - traced[0]) / load.trace_speed for at in traced[:count]]
    if kind in ("at-once", "closed"):
        return [0.0] * count
    units = _units(kind, load, count)
    if kind == "ramp":
        return list(map(ramp(load, count), units))
    return [unit / load.request_rate for unit in units]


def _units(kind: str, load: ServeLoad, count: int) -> list[float]:
    """Times of a process of rate 1; a ramp has the burstiness that is asked for."""
    if kind == "constant":
        return [float(i) for i in range(count)]
    shape = 1.0 if kind == "poisson" else load.burstiness
    rng = random.Random(load.seed)
    return list(itertools.accumulate((rng.gammavariate(shape, 1 / shape) for _ in range(count - 1)), initial=0.0))


def ramp(load: ServeLoad, count: int) -> Callable[[float], float]:
    """When so many requests have come, on average, while the rate goes from start to end over `count` requests.

    Linear: n(t) = a t + (b - a) t^2 / 2T, T = 2 count / (a + b). Exponential: n(t) = a T / k (e^(k t / T) - 1),
    k = ln(b / a), T = count k / (b - a). What comes later keeps the last rate.
    """
    a, b = load.ramp_up_start_rps, load.ramp_up_end_rps
    if a == b:
        return lambda n: n / a
    if load.ramp_up_strategy == "exponential":
        k = math.log(b / a)
        length = count * k / (b - a)

        def found(n: float) -> float:
            return length / k * math.log1p(n * k / (a * length))

    else:
        length = 2 * count / (a + b)
        grows = (b - a) / length

        def found(n: float) -> float:
            return 2 * n / (a + math.sqrt(max(0.0, a * a + 2 * grows * n))) if n else 0.0

    return lambda n: found(n) if n <= count or not b else length + (n - count) / b
