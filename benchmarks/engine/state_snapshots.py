"""Prompt tokens that snapshots of recurrent states save, in so much memory, beside a cache without an end.

    python -m benchmarks.engine.state_snapshots
    python -m benchmarks.engine.state_snapshots --gib 1 --live 50 200 --history stripped

Conversations begin with one of some system prompts and go on turn by turn; `--live` of them take turns at random, and a
new one begins where one ends. With `--history plain` a prompt is all that was said and a new question; `stripped`: of
earlier answers only the second half is kept, as templates drop what a model thought. The scheduler, block tables and
slots are real, the model is not: it draws random tokens. There is room for all blocks, so that slots alone are scarce.

Printed are shares of the prompt tokens that a cache with room for all snapshots saves: by what each saves (`quire`) and
for the least recently used one making room first (`lru`). `limit`: the most that any choice could save, of one that
knows who comes when, the ends of system prompts not counted. Beside it, what a model without states would save.
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from quire.cache.blocks import BlockPool
from quire.cache.groups import TableSizes
from quire.cache.prefix import PrefixCache
from quire.cache.snapshots import SnapshotValues, ValuedSnapshot
from quire.cache.states import StateSlots
from quire.cache.tables import BlockTables
from quire.core.config import SchedulerConfig
from quire.core.params import SamplingParams
from quire.core.plan import ChunkResult
from quire.core.request import Request
from quire.sched.scheduler import Scheduler

BLOCK, LENGTH, VOCABULARY = 16, 1 << 18, 100_000
ENOUGH = 1 << 16
"""Slots, where there is room for all; blocks, eight times as many."""


class LeastRecentlyUsed(SnapshotValues):
    """Whichever was used longest ago is worth least."""

    def worth(self, snapshot: ValuedSnapshot) -> float:
        """Nothing: of equals the first that was used makes room."""
        return 0.0


@dataclass
class Conversation:
    """What was said so far, how many turns are left, and what draws its lengths and tokens."""

    name: int
    said: list[int]
    left: int
    rng: random.Random
    answer: list[int] = field(default_factory=list)

    def prompt(self, stripped: bool) -> tuple[int, ...]:
        """The prompt of the next turn."""
        answer, draw = self.answer, self.rng.randrange
        self.said += answer[len(answer) // 2 :] if stripped else answer
        self.said += [draw(VOCABULARY) for _ in range(self.rng.choice((30, 100, 300, 1500)))]
        self.left -= 1
        self.answer = []
        return tuple(self.said)


@dataclass(frozen=True)
class Load:
    """Conversations, as the flags of the command say them: the same turns in the same order for every cache."""

    conversations: int
    live: int
    systems: int
    stripped: bool
    seed: int

    def begun(self) -> Iterator[Conversation]:
        """All conversations, before their first question."""
        rng = random.Random(self.seed)
        systems = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(500, 3000))] for _ in range(self.systems)]
        for name in range(self.conversations):
            own = random.Random(f"{self.seed} {name}")
            yield Conversation(name, list(rng.choice(systems)), rng.randint(2, 12), own)


@dataclass
class Flow:
    """The largest weight of intervals of which no more than `slots` lie over any moment: a flow of least cost."""

    moments: int
    slots: int
    edges: list[list[list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.edges = [[] for _ in range(self.moments)]
        for moment in range(self.moments - 1):
            self.add(moment, moment + 1, 0, self.slots)

    def add(self, start: int, end: int, weight: int, most: int = 1) -> None:
        """An interval that weighs so much."""
        self.edges[start].append([end, most, -weight, len(self.edges[end])])
        self.edges[end].append([start, 0, weight, len(self.edges[start]) - 1])

    def largest(self) -> int:
        """Weight of the best choice: one way from the first moment to the last for each slot."""
        return sum(self._way() for _ in range(self.slots))

    def _way(self) -> int:
        far, back, todo = [1] * self.moments, [(0, 0)] * self.moments, deque([0])
        far[0] = 0
        while todo:
            at = todo.popleft()
            for i, (to, most, cost, _) in enumerate(self.edges[at]):
                if most and (far[to] > 0 or far[at] + cost < far[to]):
                    far[to], back[to] = far[at] + cost, (at, i)
                    todo.append(to)
        to = self.moments - 1
        while to:
            at, i = back[to]
            edge = self.edges[at][i]
            edge[1] -= 1
            self.edges[to][edge[3]][1] += 1
            to = at
        return -far[-1]


class Cache:
    """The real scheduler with so many slots (0: a model without states), and what it found."""

    def __init__(self, slots: int, interval: int, values: SnapshotValues, batch: int) -> None:
        pool = BlockPool(8 * ENOUGH)
        states = StateSlots(slots, BLOCK, interval, batch, None, values) if slots else None
        prefix = PrefixCache(pool, BLOCK, states=None if states is None else states.pool)
        config = SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=4096)
        tables = BlockTables(pool, prefix, TableSizes(BLOCK, 4096), None, states)
        self.scheduler = Scheduler(config, tables, LENGTH)
        self.prompts = self.found = self.rounds = 0
        self.turns: list[tuple[str, int, int]] = []

    def run(self, load: Load) -> int:
        """Serve all conversations, a turn of as many as a batch has at one time; prompt tokens that were found.

        `turns`: of each, whose it is, in which round, and the tokens of its prompt that were found.
        """
        rng, waiting = random.Random(load.seed), load.begun()
        idle = list(islice(waiting, load.live))
        while idle:
            count = min(len(idle), self.scheduler.config.max_num_seqs)
            turn = [idle.pop(rng.randrange(len(idle))) for _ in range(count)]
            for conversation in turn:
                params = SamplingParams(max_tokens=conversation.rng.choice((20, 100, 400)))
                prompt = conversation.prompt(load.stripped)
                self.prompts += len(prompt)
                self.scheduler.add(
                    Request(id=str(conversation.name), prompt=prompt, params=params, seed=0, arrival=0.0)
                )
            by_name = {str(each.name): each for each in turn}
            while self.scheduler.has_work:
                self._step(by_name)
            self.rounds += 1
            idle += [each for each in turn if each.left]
            idle += islice(waiting, load.live - len(idle))
        return self.found

    def _step(self, turn: dict[str, Conversation]) -> None:
        plan = self.scheduler.plan()
        results = []
        for chunk in plan.chunks:
            draws, rng = chunk.start + chunk.count == len(chunk.seq.tokens), turn[chunk.seq.request.id].rng
            results.append(ChunkResult([rng.randrange(VOCABULARY)] if draws else [], [], [], finite=chunk.logits > 0))
        for output in self.scheduler.commit(plan, results):
            turn[output.request_id].answer += output.tokens
            if output.finish_reason:
                self.found += output.cached_tokens
                self.turns.append((output.request_id, self.rounds, output.cached_tokens))

    def limit(self, slots: int) -> int:
        """The most that so many slots could save of what was found: each holds one conversation from turn to turn."""
        flow, first, last, found = Flow(self.rounds, slots), dict[str, int](), dict[str, int](), 0
        for name, at, tokens in self.turns:
            found += min(tokens, first.setdefault(name, tokens))
            if name in last:
                flow.add(last[name], at, max(0, tokens - first[name]))
            last[name] = at
        return found + flow.largest()


def main() -> None:
    """Serve the load by each cache, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--live", type=int, nargs="+", default=[25, 50, 100, 200], help="that take turns at one time")
    parser.add_argument("--systems", type=int, default=4, help="prompts that conversations begin with")
    parser.add_argument("--history", choices=("plain", "stripped"), nargs="+", default=["plain", "stripped"])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--gib", type=float, default=2.0, help="for snapshots, beside the states of the batch")
    parser.add_argument("--state-mib", type=float, default=18.0, help="of a sequence (Qwen3.5-0.8B: 18 MiB)")
    parser.add_argument("--token-kib", type=float, default=12.0, help="of its keys and values for a token")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    interval = -(-int(args.state_mib * 1024 / args.token_kib) // BLOCK) * BLOCK
    slots = args.batch + 1 + int(args.gib * 1024 / args.state_mib)
    print(f"{slots - args.batch - 1} snapshots in {args.gib:g} GiB, one every {interval} tokens")
    heads = f"{'history':10}{'live':>6}{'prompt tokens':>15}{'no states':>11}{'all':>8}"
    print(f"{heads}{'quire/all':>11}{'lru/all':>9}{'limit/all':>11}")
    for history in args.history:
        for live in args.live:
            load = Load(args.conversations, live, args.systems, history == "stripped", args.seed)
            plain, every, quire, lru = (
                Cache(count, interval, values, args.batch)
                for count, values in (
                    (0, SnapshotValues()),
                    (ENOUGH, SnapshotValues()),
                    (slots, SnapshotValues()),
                    (slots, LeastRecentlyUsed()),
                )
            )
            found = [cache.run(load) for cache in (plain, every, quire, lru)]
            shares = [found[0] / plain.prompts, found[1] / every.prompts, found[2] / found[1], found[3] / found[1]]
            limit = every.limit(slots - args.batch) / found[1]
            print(f"{history:10}{live:6}{plain.prompts:15,}{shares[0]:11.3f}{shares[1]:8.3f}"
                  f"{shares[2]:11.3f}{shares[3]:9.3f}{limit:11.3f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
