"""Many steps at once where the scheduler's next plans are known: every sequence decodes and nobody can join or leave.

Such steps are most of all. What they do to sequences, blocks and counters is done here by the same tables, pool and
policy in the same order as if each had been planned and committed, so what follows is the same to the last bit: a test
holds random loads to it. Where that could not be said - windows that slide, recurrent states, chunks sized by time,
blocks that come back from a store - each step is planned.
"""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence

from quire.core.plan import Chunk, ChunkResult, StepPlan
from quire.core.request import Output
from quire.core.sequence import Sequence
from quire.sched.policy import Fair
from quire.sched.scheduler import Scheduler

MOST = 1024
"""Steps at once: their times are kept until then."""


def next_decodes(scheduler: Scheduler, now: float, refused: bool) -> int:
    """How many of the next steps do nothing but to decode a token of each running sequence; 0: ask the scheduler.

    `now`: when the last step ended. `refused`: it did the same, and whoever waits first found no room in it.
    """
    running, tables = scheduler.running, scheduler.tables
    if not running or any(seq.times.last_token != now for seq in running):
        return 0  # prompts, and whoever had no part of the last step
    if scheduler.pace.limits or len(scheduler.recall) or len(scheduler.readying):
        return 0
    if tables.sizes.windows != (0,) or tables.pool.lanes != 1 or tables.states is not None:
        return 0
    if len(scheduler.waiting) and not _nobody_joins(scheduler, refused):
        return 0
    longest = scheduler.max_model_len
    steps = min(left(seq, longest) for seq in running)
    return _with_blocks(running, tables.block_size, tables.pool.num_free, min(steps, MOST))


def left(seq: Sequence, longest: int) -> int:
    """Tokens that a sequence is still to get."""
    most, made = seq.request.params.max_tokens, len(seq.tokens)
    return min(longest - made, longest if most is None else most - made + seq.prompt_len)


def _nobody_joins(scheduler: Scheduler, refused: bool) -> bool:
    """Whether those that wait go on waiting as long as nobody comes or ends."""
    policy, waiting, running = scheduler.policy, scheduler.waiting, scheduler.running
    if len(running) >= scheduler.config.max_num_seqs:
        places = scheduler.config.max_num_seqs
        return all(policy.displaced(running, head, places) is None for head in waiting.heads())
    if scheduler.config.static_batching:
        return refused
    if not refused or isinstance(policy, Fair):  # whose head changes as others are served
        return False
    head, tables = waiting.head(), scheduler.tables
    if policy.displaced(running, head, scheduler.config.max_num_seqs) is not None:
        return False
    if tables.prefix is None or head.kv.blocks:
        return True
    # It looks for its prefix in every step: nothing may be found later than now, nor be lost.
    first = min(seq.computed for seq in running) >= tables.block_size
    return first and not tables.prefix.match(head, tables.sizes.windows)[0]


def _with_blocks(running: GenericSequence[Sequence], size: int, free: int, steps: int) -> int:
    """Take as many of `steps` as there are blocks for."""
    need = sum((seq.computed + steps - 1) // size - (seq.computed - 1) // size for seq in running)
    while steps and need > free:
        steps //= 2
        need = sum((seq.computed + steps - 1) // size - (seq.computed - 1) // size for seq in running)
    return steps


def serve(scheduler: Scheduler, steps: int) -> None:
    """Tell the policy of `steps` in which all that run got a row."""
    if not scheduler.policy.counts:
        return
    for seq in scheduler.running:
        seq.computed += 1  # as it is when a plan tells of it
        for _ in range(steps):
            scheduler.policy.served(seq, 1)
        seq.computed -= 1


def advance(scheduler: Scheduler, steps: int, end: float) -> list[Output]:
    """Do `steps` that `next_decodes` allowed, the last of which ends at `end`, the scheduler's clock now.

    Returns the outputs of those that end with it. A sequence's tokens are its request's `seed`.
    """
    tables, longest = scheduler.tables, scheduler.max_model_len
    order = sorted(scheduler.running, key=scheduler.policy.rank)
    lasts = [seq for seq in order if left(seq, longest) == steps]
    ends = set(lasts)
    events = _block_events(order, tables.block_size, steps, tables.prefix is not None)
    starts = [seq.computed for seq in order]
    for seq in order:
        seq.tokens += [seq.request.seed] * (steps - (seq in ends))
    copies: list[tuple[int, int]] = []
    for step, publishes, place in events:
        seq, at = order[place], starts[place] + step
        if not publishes:
            seq.computed = at
            reserved = tables.reserve(seq, at + 1, copies)
            assert reserved and not copies, "there are blocks, and what a sequence writes is its own"
        elif step < steps - 1 or seq not in ends:
            tables.publish(seq, at + 1)
    for seq, start in zip(order, starts, strict=True):
        seq.computed = start + steps
        if seq not in ends:
            seq.times.last_token = end
        else:
            seq.in_flight = seq.steps_in_flight = 1
    plan = StepPlan(chunks=tuple(Chunk(seq, seq.computed - 1, 1, 1) for seq in lasts))
    return scheduler.commit(plan, [ChunkResult([seq.request.seed], [], [], finite=True) for seq in lasts])


def _block_events(order: GenericSequence[Sequence], size: int, steps: int, shares: bool) -> list[tuple[int, bool, int]]:
    """(step, whether a block is published, place of the sequence) of all blocks that are begun or filled, as they are:
    a step's plan comes before its commit."""
    events = []
    for place, seq in enumerate(order):
        start = seq.computed
        events += [(step, False, place) for step in range(-start % size, steps, size)]
        if shares:
            events += [(step, True, place) for step in range((-start - 1) % size, steps, size)]
    events.sort()
    return events
