"""When the requests of a load are due, in seconds from its start."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from quire.core.errors import ConfigError

NUMBERS = {"at-once": 0, "closed": 0, "constant": 1, "poisson": 1, "gamma": 2, "ramp": 2}
"""How many numbers follow each name: rates per second, of gamma its burstiness too (1 = Poisson, less = bursts)."""


@dataclass(frozen=True)
class Arrivals:
    """`kind` of `NUMBERS` and its numbers."""

    kind: str
    numbers: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Requests per second offered on average; 0 where arrivals have none."""
        if self.kind == "ramp":
            return sum(self.numbers) / 2
        return self.numbers[0] if self.numbers else 0.0

    def due(self, count: int, seed: int) -> list[float]:
        """Due times of `count` requests; the first comes at once. A ramp's rate rises evenly from request to
        request."""
        rng = random.Random(seed)
        if not self.numbers:
            return [0.0] * count
        rate = self.numbers[0]
        if self.kind == "ramp":
            last = self.numbers[1]
            gaps = [1 / (rate + (last - rate) * i / max(1, count - 2)) for i in range(count - 1)]
        elif self.kind == "constant":
            gaps = [1 / rate] * (count - 1)
        else:
            shape = self.numbers[1] if self.kind == "gamma" else 1.0
            gaps = [rng.gammavariate(shape, 1 / (rate * shape)) for _ in range(count - 1)]
        return list(itertools.accumulate(gaps, initial=0.0))


def parse_arrivals(text: str, where: str) -> Arrivals:
    """Parse "at-once" or "gamma:2:0.5"; `ConfigError` says what is wrong and `where`."""
    kind, *given = text.split(":")
    if kind not in NUMBERS:
        raise ConfigError(f"{where}: arrivals {text!r}: known are {', '.join(NUMBERS)}")
    try:
        numbers = tuple(float(part) for part in given)
    except ValueError:
        numbers = ()
    if len(numbers) != NUMBERS[kind] or not all(0 < n < float("inf") for n in numbers):
        wanted = {0: "takes no number", 1: "is followed by a rate, as in :2", 2: "by two numbers, as in :1:4"}
        raise ConfigError(f"{where}: arrivals {text!r}: {kind} {wanted[NUMBERS[kind]]}")
    return Arrivals(kind, numbers)
