"""Latencies and throughput of a load from step times: a batch step by step, a stream in its steady state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.core.sequence import Draft
from quire.plan.planned_load import PlannedLoad
from quire.plan.rates import PlannedChunk, StepTimes
from quire.sched.token_budget import divide_budget, rows_of

TURNS = 200
"""Rounds of a fixed point; it has settled, or there is none, long before."""


class StepBounds(NamedTuple):
    """Sequences and tokens of a step at most; `ahead`: steps under way at one time."""

    seqs: int
    tokens: int
    ahead: int = 1


@dataclass(frozen=True)
class Flow:
    """Means, in seconds; `concurrency`: sequences running; `capacity`: requests a second at most, 0 for a batch.

    `stable`: whether the stream is served as fast as it comes; latencies of one that is not mean nothing.
    """

    ttft: float
    tpot: float
    e2e: float
    requests_per_s: float
    concurrency: float
    capacity: float = 0.0
    stable: bool = True


@dataclass(eq=False)
class _Running:
    """A sequence of the batch: tokens of its prompt, computed, output tokens made, when the first came."""

    prompt: int
    computed: int
    made: int = 0
    first: float = 0.0
    ended: float = 0.0
    draft: Draft = field(default_factory=Draft)
    again: int = 0

    @property
    def target(self) -> int:
        return self.prompt + self.made


def batch_flow(times: StepTimes, load: PlannedLoad, limits: StepBounds) -> Flow:
    """`load.batch` requests that come at once, by the scheduler's own rule for who advances by how much; who does not
    fit waits.
    """
    waiting = [_Running(load.input, load.shared if i else 0) for i in range(load.batch)]
    running: list[_Running] = []
    done: list[_Running] = []
    now = 0.0
    while waiting or running:
        chunks, advanced = _plan(running, waiting, limits)
        steps = _stretch(advanced, load) if len(advanced) == len(running) and all(s.made for s in advanced) else 1
        now += steps * times.seconds([PlannedChunk(c.rows, c.context + (steps - 1) // 2) for c in chunks])
        for seq, chunk in zip(advanced, chunks, strict=True):
            seq.computed += chunk.rows + steps - 1
            if seq.computed < seq.target:
                continue
            seq.made += steps
            seq.first = seq.first or now
            if seq.made >= load.output:
                seq.ended = now
                done.append(seq)
        running = [seq for seq in running if not seq.ended]
    gaps = [(s.ended - s.first) / (load.output - 1) for s in done] if load.output > 1 else [0.0]
    held = sum(s.ended for s in done)
    return Flow(
        ttft=_mean([s.first for s in done]), tpot=_mean(gaps), e2e=held / len(done),
        requests_per_s=len(done) / now, concurrency=held / now,
    )  # fmt: skip


def _plan(
    running: list[_Running], waiting: list[_Running], limits: StepBounds
) -> tuple[list[PlannedChunk], list[_Running]]:
    """What each sequence advances by in the next step, and those that do; who is admitted goes over to `running`."""
    room = limits.seqs - len(running)
    counts = divide_budget(running, limits.tokens, True, waiting[0] if waiting and room else None, lambda seq: 0.0)
    left = limits.tokens - sum(counts.values())
    while waiting and room and left:
        running.append(seq := waiting.pop(0))
        counts[seq] = rows_of(seq, left, True)
        left, room = left - counts[seq], room - 1
    advanced = [seq for seq, rows in counts.items() if rows]
    return [PlannedChunk(counts[seq], seq.computed) for seq in advanced], advanced


def _stretch(running: Sequence[_Running], load: PlannedLoad) -> int:
    """Steps until a sequence ends, all of which are alike but for the context, on which a step depends linearly."""
    return max(1, min(load.output - seq.made for seq in running))


def stream_flow(times: StepTimes, load: PlannedLoad, limits: StepBounds) -> Flow:
    """Requests that come at `load.rate` (Poisson), in the steady state: Little's law, L = rate x time in the system.

    A token waits for the decode step of all that run and for prompts that steps take along meanwhile; a prompt queues
    for its steps as in M/D/1 (Pollaczek-Khinchine). `capacity` is the rate from which there is no steady state.
    """
    found = steady_flow(times, load, load.rate, limits)
    low, high = 0.0, max(load.rate, 1e-3)
    while high < 1e9 and steady_flow(times, load, high, limits) is not None:
        low, high = high, 2 * high
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if steady_flow(times, load, middle, limits) is not None else (low, middle)
        if high - low < 1e-3 * high:
            break
    if found is None:
        at = steady_flow(times, load, low, limits) if low else None
        slow = at or Flow(0, 0, 0, 0, limits.seqs)
        return Flow(slow.ttft, slow.tpot, slow.e2e, low, slow.concurrency, low, False)
    return Flow(found.ttft, found.tpot, found.e2e, load.rate, found.concurrency, low)


def steady_flow(times: StepTimes, load: PlannedLoad, rate: float, limits: StepBounds) -> Flow | None:
    """The steady state at `rate` requests a second, without a capacity; None where there is none within the limits."""
    prompt, context = load.input - load.shared, load.input + load.output // 2
    others = 0.0
    for _ in range(TURNS):
        seen = 1 + others
        if others > limits.seqs:
            return None
        whole = max(1, round(seen))
        decodes = [PlannedChunk(1, context)] * whole
        alone = times.seconds(decodes) * seen / whole if seen > whole * 1.5 else times.seconds(decodes)
        rows = min(prompt, max(1, limits.tokens - whole))
        steps = prompt / rows
        mixed = times.seconds([*decodes, PlannedChunk(rows, load.shared + (prompt - rows) // 2)])
        busy = rate * steps * (mixed - alone)
        served = steps * mixed
        if busy >= 1 or rate * served >= 1:
            return None
        gap = alone / (1 - busy)
        more = rate * load.output * gap
        if abs(more - others) < 1e-3 * (1 + others):
            queue = rate * served * served / (2 * (1 - rate * served))
            residual = min(1.0, others) * alone / 2
            ttft = queue + residual + served
            e2e = ttft + (load.output - 1) * gap
            return Flow(ttft, gap, e2e, rate, rate * e2e)
        others += (more - others) * 0.7
    return None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
