"""Who may be drafted for, and how far: a draft is written to blocks before the step that verifies it is planned."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from quire.core.plan import StepPlan
from quire.core.sequence import Sequence
from quire.sched.scheduler import Scheduler


def undrafted(scheduler: Scheduler) -> list[Sequence]:
    """Sequences whose next row gives a token, all before it being computed and known."""
    ready = (s for s in scheduler.unfinished() if s.draftable and not s.steps and not s.draft)
    return [s for s in ready if s.computed == len(s.tokens) - 1]


def room_for_drafts(scheduler: Scheduler, wanted: Rows[tuple[Sequence, int]]) -> tuple[list[int], StepPlan]:
    """How many tokens each of the `undrafted` may draft now, of as many as it wants.

    Their blocks may be written once the plan, which has no chunks, is prepared.
    """
    copies: list[tuple[int, int]] = []
    for seq, _ in wanted:
        seq.parents = []
    counts = [_room(scheduler, seq, count, copies) for seq, count in wanted]
    return counts, StepPlan(blocks=scheduler.upkeep.take(copies))


def _room(scheduler: Scheduler, seq: Sequence, count: int, copies: list[tuple[int, int]]) -> int:
    """None that could not be kept, and none whose blocks another running sequence may want in this step."""
    tables = scheduler.tables
    most, made = seq.request.params.max_tokens, len(seq.tokens) - seq.prompt_len
    count = min(count, scheduler.max_model_len - len(seq.tokens) - 1)
    if most is not None:
        count = min(count, most - made - 1)
    spare = len(scheduler.running) * len(tables.sizes.windows)
    while count > 0:
        upto = len(seq.tokens) + count
        if tables.pool.fits(tables.missing(seq, upto), spare):
            tables.reserve(seq, upto, copies)
            return count
        count //= 2
    return 0
