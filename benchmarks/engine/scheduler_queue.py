"""The scheduler's time of a step while others wait, and how long an idle engine verifies its account of blocks.

    python -m benchmarks.engine.scheduler_queue
    python -m benchmarks.engine.scheduler_queue --waiting 0 10000 --policies fair --steps 400

The scheduler, block tables and pool are real, the model is not: each of a batch draws a token a step. Two pools: in one
there are blocks for everybody and the batch has no place left; in the other there are places, and no blocks, so each
plan looks whether the first that waits finds any. Waiting lines of all lengths take turns, a step each; medians of
`plan` and `commit` together, and of one request that comes and goes again, in processor time of the thread. The goal is
the same time for any length.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from typing import NamedTuple

from quire.cache.blocks import SLICE, BlockPool
from quire.cache.groups import TableSizes
from quire.cache.prefix import PrefixCache
from quire.cache.tables import BlockTables
from quire.core.config import SchedulerConfig
from quire.core.params import SamplingParams
from quire.core.plan import ChunkResult
from quire.core.request import Request
from quire.sched.policy import POLICIES
from quire.sched.scheduler import Scheduler

BLOCK, PROMPT = 16, 20
"""Tokens of a block and of each prompt: all steps write to the second block of a sequence."""
LENGTH = 4096


class Times(NamedTuple):
    """Seconds of each step, and of each request that came and went."""

    steps: list[float]
    comings: list[float]


def request(name: str, tenant: int, priority: int) -> Request:
    """One that would run for long."""
    prompt = tuple((tenant * 31 + i) % 1000 for i in range(PROMPT))
    params = SamplingParams(max_tokens=LENGTH - PROMPT)
    return Request(id=name, prompt=prompt, params=params, seed=0, arrival=0.0, priority=priority, tenant=f"t{tenant}")


class Line:
    """A batch that runs, and `waiting` requests of `tenants` tenants behind it."""

    def __init__(self, policy: str, waiting: int, full: bool, batch: int, tenants: int) -> None:
        self.waiting, self.full, self.times, self._came = waiting, full, Times([], []), 0
        pool = BlockPool(batch * 8)
        places = batch * 2 if full else batch
        config = SchedulerConfig(max_num_seqs=places, max_num_batched_tokens=batch * PROMPT, scheduling_policy=policy)
        sizes = TableSizes(BLOCK, config.max_num_batched_tokens)
        self.scheduler = Scheduler(config, BlockTables(pool, PrefixCache(pool, BLOCK), sizes), LENGTH)
        for i in range(batch):
            self.scheduler.add(request(f"runs {i}", i, 0))
            self.step()
        assert len(self.scheduler.running) == batch
        while full and pool.num_free > batch // 2:
            pool.allocate()
        for i in range(waiting):
            self.scheduler.add(request(f"waits {i}", batch + i % tenants, 1))
        self._tenants = batch, tenants

    def step(self) -> float:
        """Plan and commit, and leave all as it was before; the seconds that took."""
        begin = time.thread_time()
        plan = self.scheduler.plan()
        planned = time.thread_time()
        results = [ChunkResult([1] if chunk.logits else [], [], [], finite=True) for chunk in plan.chunks]
        made = time.thread_time()
        self.scheduler.commit(plan, results)
        seconds = time.thread_time() - made + planned - begin
        for chunk in plan.chunks:
            if len(chunk.seq.tokens) > PROMPT + 1:
                chunk.seq.tokens.pop()
                chunk.seq.computed -= 1
        return seconds

    def come_and_go(self) -> float:
        """The seconds of a request that is added and aborted, among those that wait."""
        batch, tenants = self._tenants
        self._came += 1
        coming = request(f"comes {self._came}", batch + self._came % tenants, 1)
        begin = time.thread_time()
        self.scheduler.add(coming)
        self.scheduler.abort(coming.id)
        return time.thread_time() - begin

    def turn(self) -> None:
        """One step, and one that comes and goes."""
        self.times.steps.append(self.step())
        self.times.comings.append(self.come_and_go())


def lines(policy: str, args: argparse.Namespace) -> list[Line]:
    """All lengths before both pools, measured."""
    made = [Line(policy, count, full, args.batch, args.tenants) for full in (False, True) for count in args.waiting]
    gc.collect()
    gc.disable()
    for turn in range(args.steps + args.steps // 10):
        for line in random.sample(made, len(made)):
            line.turn()
        if turn == args.steps // 10:
            for line in made:
                line.times = Times([], [])
    gc.enable()
    return made


def account(blocks: int) -> tuple[float, float]:
    """(median, longest) milliseconds of a part of the account of so many blocks, all of them free and findable."""
    pool, rng = BlockPool(blocks), random.Random(0)
    held = [pool.allocate() for _ in range(blocks)]
    for i, block in enumerate(held):
        pool.publish(block, i.to_bytes(16, "little"), [i] * BLOCK)
    for block in rng.sample(held, blocks):
        pool.release(block)
    seconds, more = list[float](), True
    while more:
        begin = time.thread_time()
        more = pool.check_more()
        seconds.append(time.thread_time() - begin)
    return 1e3 * statistics.median(seconds), 1e3 * max(seconds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 1_000, 10_000, 100_000])
    parser.add_argument("--policies", choices=POLICIES, nargs="+", default=list(POLICIES))
    parser.add_argument("--tenants", type=int, default=500, help="of those that wait")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--blocks", type=int, nargs="+", default=[65_536, 262_144])
    args = parser.parse_args()
    print(f"{'policy':10}{'pool':8}{'waiting':>10}{'plan + commit':>16}{'of none':>10}{'come and go':>14}")
    for policy in args.policies:
        found = lines(policy, args)
        for full in (False, True):
            own = [line for line in found if line.full == full]
            least = statistics.median(own[0].times.steps)
            for line in own:
                step, coming = statistics.median(line.times.steps), statistics.median(line.times.comings)
                print(f"{policy:10}{'full' if full else 'free':8}{line.waiting:10,}{1e3 * step:13.3f} ms"
                      f"{step / least:10.2f}{1e6 * coming:11.1f} us")  # fmt: skip
    for blocks in args.blocks:
        usual, longest = account(blocks)
        parts = -(-blocks // SLICE)
        print(f"account of {blocks:,} blocks, {parts} parts: {usual:.3f} ms each, the longest {longest:.3f} ms")


if __name__ == "__main__":
    main()
