"""Replicas in virtual time: a heap of what happens when, and the steps of each."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

from quire.plan.rates import StepTimes
from quire.simulate.fleet import Fleet
from quire.simulate.measures import Measures
from quire.simulate.replica import Replica, Setup
from quire.simulate.scaling import Autoscale
from quire.simulate.store import SimulatedLink, SimulatedStore


class Event(IntEnum):
    """What happens, in the order of what happens at one time."""

    UP = 0
    DOWN = 1
    READ = 2
    HAND_ON = 3
    GIVE_UP = 4
    SCALE = 5
    SAMPLE = 6
    STEP = 7
    WAKE = 8


@dataclass(frozen=True, kw_only=True)
class Design:
    """A cluster. Seconds, but for `edge_ms`: what network, HTTP and tokenizer add to the time of every first token.

    `mtbf`: mean time between failures of one replica, 0: none; `failures`: (time, replica); one that failed, or is
    started by `autoscale`, serves after `start`. `patience`: after which a client leaves, 0: never. `link`: how blocks
    go from the first `prefill` replicas, which compute prompts, to the others.
    """

    setup: Setup
    times: StepTimes
    replicas: int = 1
    router: str = "prefix"
    prefill: int = 0
    link: SimulatedLink | None = None
    mtbf: float = 0.0
    failures: tuple[tuple[float, int], ...] = ()
    start: float = 30.0
    autoscale: Autoscale | None = None
    patience: float = 0.0
    edge_ms: float = 0.0
    sample: float = 1.0
    seed: int = 0


class Timeline:
    """What happens next, by time, kind and replica. `now`: seconds since the start."""

    def __init__(self, design: Design, targets: Mapping[str, float]) -> None:
        self.design, self.now = design, 0.0
        scale = design.autoscale
        count = scale.high if scale else design.replicas
        self.measures, self.fleet = Measures(targets), Fleet(count, scale.low if scale else count)
        self.store = None if design.link is None else SimulatedStore(design.link, self._clock, self._later)
        tiers = [partial(self.store.tiers, i) if self.store else None for i in range(count)]
        self.replicas = [Replica(design.setup, design.times, self._clock, self.measures, each) for each in tiers]
        self._events: list[tuple[float, int, int, int, str]] = []
        self._reads: list[list[Callable[[], None]]] = [[] for _ in range(count)]
        self._known = [0] * count

    def _clock(self) -> float:
        return self.now

    def _pass(self, time: float) -> None:
        self.fleet.account(self.now)
        self.now = time

    def _push(self, time: float, kind: Event, at: int = 0, name: str = "") -> None:
        heapq.heappush(self._events, (time, kind, at, self.replicas[at].version, name))

    def _begin(self, at: int) -> None:
        until = self.replicas[at].begin()
        if until is not None:
            self._known[at] = self.replicas[at].version
            self._push(until, Event.STEP, at)

    def _touch(self, at: int) -> None:
        """Something was told to a replica: it begins now, or its step under way is the last of its run."""
        replica = self.replicas[at]
        if replica.until is None:
            self._push(self.now, Event.WAKE, at)
        elif replica.version != self._known[at]:
            self._known[at] = replica.version
            self._push(replica.until, Event.STEP, at)

    def _later(self, at: int, seconds: float, call: Callable[[], None]) -> None:
        """Events of one replica, in the order in which they are asked for."""
        self._reads[at].append(call)
        self._push(self.now + seconds, Event.READ, at)
