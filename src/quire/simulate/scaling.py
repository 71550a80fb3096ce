"""How many replicas are wanted: the rule of Kubernetes' horizontal pod autoscaler over utilization or the queue.

And how many hold a target, for a search.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import msgspec

from quire.core.errors import ConfigError

TOLERANCE = 0.1
"""Nothing is changed while load and target differ by less, as Kubernetes has it."""


class Autoscale(msgspec.Struct, frozen=True, kw_only=True):
    """Autoscaling from `low` to `high` replicas, so many that `metric` of each is `target`; looked at every `every`
    seconds.

    `metric`: "utilization", sequences in flight beside those that a batch holds, or "queue", those that wait. Fewer
    are wanted only once fewer were wanted for `down_after` seconds.
    """

    low: int
    high: int
    metric: str = "utilization"
    target: float = 0.7
    every: float = 15.0
    down_after: float = 300.0

    def validate(self) -> None:
        """`ConfigError` for what cannot be."""
        if not 1 <= self.low <= self.high:
            raise ConfigError(f"--autoscale {self.low}:{self.high}: needs 1 <= least <= most", param="autoscale")
        if not (self.target > 0 and self.every > 0 and self.down_after >= 0):
            raise ConfigError("--scale-target and --scale-every must be positive, --scale-down-after not negative")


class Scaler:
    """Remembers what was wanted lately."""

    def __init__(self, rule: Autoscale) -> None:
        self.rule = rule
        self._wanted: deque[tuple[float, int]] = deque()

    def wanted(self, now: float, replicas: int, load: float) -> int:
        """Number of replicas wanted of `replicas` that serve or start; `load`: the metric, over all of them
        together."""
        rule = self.rule
        ratio = load / (rule.target * replicas)
        count = replicas if abs(ratio - 1) <= TOLERANCE else math.ceil(load / rule.target)
        self._wanted.append((now, min(max(count, rule.low), rule.high)))
        while self._wanted[0][0] < now - rule.down_after:
            self._wanted.popleft()
        return max(self._wanted[-1][1], min(replicas, max(count for _, count in self._wanted)))


def fewest(holds: Callable[[int], bool], most: int) -> int | None:
    """The least number up to `most` that holds, if more hold whatever fewer do; None where `most` does not.

    Doubles from 1 until one holds, then halves what is between.
    """
    low, high = 0, 1
    while not holds(high):
        if high == most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
