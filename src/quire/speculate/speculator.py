"""Between steps: who is drafted for, how many tokens, and what became of them. See docs/design/speculation.md."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass, field

from quire.core.blame import Failed, fail
from quire.core.plan import BlockWork, ChunkResult, StepPlan
from quire.core.sequence import Sequence
from quire.core.speculation import Speculation
from quire.sched.scheduler import Scheduler
from quire.speculate.draft_length import CostModel
from quire.speculate.draft_limits import cut, forced, room_for_drafts, undrafted
from quire.speculate.proposer import Proposer

MoveBlocks = Callable[[BlockWork], None]
"""Does what is to be done with whole blocks."""


@dataclass
class Drafts:
    """Totals: verified drafts, their tokens, those that were kept, and kept ones by place in the draft."""

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)


class Speculator:
    """Writes drafts before a step is planned and learns from its results. The scheduler does the rest: a draft is
    rows of a chunk, and the runner keeps a drafted token as long as it is the one that plain decoding draws."""

    def __init__(
        self, asked: Speculation, proposer: Proposer, scheduler: Scheduler, move_blocks: MoveBlocks, vocab_size: int
    ) -> None:
        self.proposer, self.totals, self._vocab_size = proposer, Drafts(), vocab_size
        self._asked, self._scheduler, self._move_blocks = asked, scheduler, move_blocks
        self._cost = CostModel(proposer.passes, asked.tokens, asked.nodes, proposer.at_once)

    @property
    def likely(self) -> bool:
        """Whether the next steps will have drafts: these are planned when the tokens before them are known."""
        return not self._asked.adaptive or self._cost.likely

    @property
    def possible(self) -> bool:
        """Whether the next step may have drafts: adaptive ones also wait for the first times of steps."""
        return not self._asked.adaptive or (self._cost.likely and self._cost.known)

    def draft(self) -> None:
        """Set the drafts of sequences where that is expected to pay."""
        scheduler, asked, proposer = self._scheduler, self._asked, self.proposer
        if asked.adaptive and not self._cost.turn():
            return
        begin = time.perf_counter()
        seqs = [seq for seq in undrafted(scheduler) if proposer.ready(seq)]
        if sees := scheduler.encoding is not None:
            seqs = [seq for seq in seqs if seq.tokens[-1] < self._vocab_size]
        rows = len(scheduler.running)
        spare = scheduler.config.max_num_batched_tokens - rows
        if not seqs or spare < len(seqs):
            return
        most = min(asked.nodes, spare // len(seqs))
        if asked.adaptive and proposer.passes:
            count, nodes = self._cost.depth(seqs, rows)
            seqs, most = seqs[:count], min(most, nodes)
        if not most:
            return
        wanted = [(seq, min(most, proposer.longest - len(seq.tokens))) for seq in seqs]
        limits, before = room_for_drafts(scheduler, wanted)
        self._move_blocks(before.blocks)
        proposer.computed(before, follow=False)
        failed: Failed = {}
        known = {} if proposer.passes else forced(seqs, limits, failed)
        self._propose(seqs, [0 if seq in known else limit for seq, limit in zip(seqs, limits, strict=True)], failed)
        for seq in seqs:
            seq.draft.tokens = known.get(seq, seq.draft.tokens)
            if sees:
                _leave_out_images(seq, self._vocab_size)
            cut(seq, failed)
        if proposer.passes and max(limits) > 0:
            self._cost.drafted(limits, proposer.seconds)
        elif asked.adaptive and not proposer.passes:
            self._cost.cut(seqs, rows)
        self._end(failed)
        for seq in seqs:
            scheduler.tables.trim(seq)
        if not proposer.passes:
            self._cost.looked(time.perf_counter() - begin)

    def _propose(self, seqs: GenericSequence[Sequence], limits: list[int], failed: Failed) -> None:
        """Have the proposer write drafts; what looks them up has nothing that sequences share but what they read."""
        try:
            self.proposer.propose(seqs, limits)
        except BaseException:
            if self.proposer.passes:  # of the whole batch
                raise
            for seq, limit in zip(seqs, limits, strict=True):
                seq.draft.tokens, seq.draft.parents, seq.draft.lookup = [], [], None
                try:
                    self.proposer.propose([seq], [limit])
                except BaseException as error:
                    fail(failed, seq, error, "drafting")

    def _end(self, failed: Failed) -> None:
        """End sequences whose draft failed, which are in no step."""
        for seq, error in failed.items():
            seq.draft.tokens, seq.draft.parents = [], []
            self._scheduler.fail(seq, error)

    def learn(self, plan: StepPlan, results: GenericSequence[ChunkResult], seconds: float, fresh: bool) -> None:
        """What a step gave, before it is committed, and how long it took. A model that drafts follows its prompts.

        `fresh`: no other step was launched since, so that its hidden rows are there.
        """
        self.proposer.computed(plan, self.likely, results if fresh else ())
        if plan.chunks and all(chunk.count == 1 + len(chunk.seq.draft.tokens) for chunk in plan.chunks):
            self._cost.stepped(plan.num_tokens, seconds)
        for chunk, result in zip(plan.chunks, results, strict=True):
            drafted = len(chunk.seq.draft.tokens)
            if drafted and result.error is None:
                accepted, seq = max(0, len(result.tokens) - 1), chunk.seq
                depth = max(len(seq.draft.branch(node)) for node in range(drafted)) if seq.draft.parents else drafted
                self._cost.verified(seq, depth, accepted)
                self._count(drafted, depth, accepted)

    def _count(self, drafted: int, depth: int, accepted: int) -> None:
        totals = self.totals
        totals.drafts += 1
        totals.tokens += drafted
        totals.accepted += accepted
        totals.accepted_per_pos += [0] * (depth - len(totals.accepted_per_pos))
        for place in range(accepted):
            totals.accepted_per_pos[place] += 1


def _leave_out_images(seq: Sequence, vocab_size: int) -> None:
    """What was looked up may be rows of an image, which are no tokens: nothing from there on is guessed."""
    if max(seq.draft.tokens, default=0) >= vocab_size:
        branches = [seq.draft.branch(node) for node in range(len(seq.draft.tokens))]
        seq.draft.prune([way[-1] for way in branches if all(seq.draft.tokens[node] < vocab_size for node in way)])
