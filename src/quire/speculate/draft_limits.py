"""How far sequences may be drafted for: by the room there is, and by their grammars.

A draft is written to blocks before the step that verifies it is planned.
"""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence

from quire.core.blame import Failed, fail
from quire.core.plan import StepPlan
from quire.core.sequence import Sequence
from quire.sched.scheduler import Scheduler
from quire.text.structured.guide import GrammarGuide


def undrafted(scheduler: Scheduler) -> list[Sequence]:
    """Sequences whose next row gives a token, all before it being computed and known."""
    ready = (s for s in scheduler.unfinished() if s.draft.enabled and not s.steps_in_flight and not s.draft.tokens)
    return [s for s in ready if s.computed == len(s.tokens) - 1]


def room_for_drafts(scheduler: Scheduler, wanted: GenericSequence[tuple[Sequence, int]]) -> tuple[list[int], StepPlan]:
    """How many tokens each of the `undrafted` may draft now, of as many as it wants.

    Their blocks may be written once the plan, which has no chunks, is prepared.
    """
    copies: list[tuple[int, int]] = []
    for seq, _ in wanted:
        seq.draft.parents = []
    counts = [_room(scheduler, seq, count, copies) for seq, count in wanted]
    return counts, StepPlan(blocks=scheduler.block_work.take(copies))


def _room(scheduler: Scheduler, seq: Sequence, count: int, copies: list[tuple[int, int]]) -> int:
    """None that could not be kept, and none whose blocks another running sequence may want in this step."""
    tables = scheduler.tables
    count = min(count, seq.limit - len(seq.tokens) - 1)
    if tables.states is not None:  # all of it may hold, and is run again before the next token, in one step
        count = min(count, scheduler.config.max_num_batched_tokens - 2)
    spare = len(scheduler.running) * len(tables.sizes.windows)
    while count > 0:
        upto = len(seq.tokens) + count
        if tables.pool.fits(tables.missing(seq, upto), spare) and tables.reserve(seq, upto, copies):
            return count
        count //= 2
    return 0


def forced(seqs: GenericSequence[Sequence], limits: GenericSequence[int], failed: Failed) -> dict[Sequence, list[int]]:
    """Tokens that a grammar leaves no choice about, at most as many as `limits` says: a draft that nobody guesses.

    A model that drafts would miss them in its own cache, so this is for those that look drafts up. Sequences whose
    grammar fails join `failed`.
    """
    found: dict[Sequence, list[int]] = {}
    for seq, limit in zip(seqs, limits, strict=True):
        guide = seq.guide
        if limit <= 0 or not isinstance(guide, GrammarGuide):
            continue
        try:
            if guide.follow(seq.tokens, seq.prompt_len) and (tokens := guide.forced()[:limit]):
                found[seq] = tokens
        except BaseException as error:
            fail(failed, seq, error, "grammar")
    return found


def cut(seq: Sequence, failed: Failed) -> None:
    """Leave out of a draft what the grammar refuses, and all that follows it: its rows would give nothing. `seq` joins
    `failed` where its grammar fails."""
    try:
        _cut(seq)
    except BaseException as error:
        fail(failed, seq, error, "grammar")


def _cut(seq: Sequence) -> None:
    guide = seq.guide
    if not seq.draft.tokens or not isinstance(guide, GrammarGuide) or not guide.follow(seq.tokens, seq.prompt_len):
        return
    if not seq.draft.parents:
        seq.draft.prune(list(range(guide.may(seq.draft.tokens))))
        return
    branches = (seq.draft.branch(node) for node in range(len(seq.draft.tokens)))
    seq.draft.prune([way[-1] for way in branches if guide.may([seq.draft.tokens[node] for node in way]) == len(way)])
