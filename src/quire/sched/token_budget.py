"""How many tokens a step has, and how they are shared: decodes first, then prompts, of which a long one leaves room for
others."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as GenericSequence
from typing import Protocol, TypeVar

from quire.core.config import SchedulerConfig
from quire.core.plan import Chunk, StepPlan
from quire.core.sequence import Draft, Sequence

LEAST = 4
"""Rows of prompts in a step at least: they must get on, and so few cost next to nothing beside decodes."""
RISE, FALL = 0.5, 0.1
"""How fast an estimate follows what was measured: a row that took longer must not happen twice."""
START = 0.002
"""Seconds that a row of a prompt takes, before any was measured."""


class Schedulable(Protocol):
    """A sequence as far as its share of a step depends on it: the planner's have no tokens."""

    computed: int
    draft: Draft

    @property
    def target(self) -> int:
        """Tokens that are to be computed."""
        ...

    @property
    def again(self) -> int:
        """Tokens that are run again with the next ones."""
        ...


T = TypeVar("T", bound=Schedulable)


def decodes(seq: Schedulable) -> bool:
    """Whether all but its last token and its draft are computed: it is one row away from a token."""
    return seq.target - seq.computed <= 1 + len(seq.draft.tokens)


def decode_rows(seq: Schedulable) -> int:
    """Rows in a step of one that `decodes`: what is run again, its last token and its draft."""
    return seq.again + 1 + len(seq.draft.tokens)


def is_decode_chunk(chunk: Chunk) -> bool:
    """Whether a chunk is a token's row, with its draft, and not of a prompt."""
    return chunk.count == chunk.logits and chunk.start >= chunk.seq.prompt_len


class PrefillPace:
    """Sizes chunks of prompts by time, so that tokens of others keep coming (Sarathi-Serve, Agrawal et al. 2024).

    It learns how long decodes, and rows of prompts beside them, take. `limits`: whether there is a target.
    """

    def __init__(self, target: float) -> None:
        """`target`: seconds of a step; 0: no limit."""
        self._target, self.limits = target, target > 0
        self._decodes, self._row = 0.0, START

    def budget(self, decodes: int, most: int) -> int:
        """Rows of a step that has so many of decodes, of `most` at most. Without decodes nobody waits for a token."""
        if not self._target or not decodes:
            return most
        rows = int(max(0.0, self._target - self._decodes) / self._row)
        return min(most, decodes + max(LEAST, rows))

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """The step of `plan` took so long."""
        if not self.limits or not (decodes := sum(chunk.rows for chunk in plan.chunks if is_decode_chunk(chunk))):
            return
        prompts = plan.num_tokens - decodes
        if not prompts:
            self._decodes = _toward(self._decodes or seconds, seconds)
        elif self._decodes:
            self._row = _toward(self._row, max(0.0, seconds - self._decodes) / prompts)


def _toward(known: float, found: float) -> float:
    return known + (RISE if found > known else FALL) * (found - known)


class MicroBatches:
    """How much of what could be computed goes into one step, where several are under way at one time.

    A sequence whose next token is not known yet is in no other step, so decodes are divided among steps: as many as
    there are stages, no more, because every step reads all weights. Few that come back while as many others are under
    way wait for more: llama-1b gave half of its tokens a second in four steps of 4 sequences. Prompts are cut finer, as
    chunks of one prompt may follow each other at once, and stages wait for the first (Huang et al. 2019, GPipe).
    """

    def __init__(self, stages: int = 1, steps: int = 1) -> None:
        """`stages`: that compute at the same time; `steps`: under way at one time at most."""
        self._stages, self._steps, self.staged = stages, steps, stages > 1
        self._decoding: list[list[Sequence]] = []  # of each step under way

    def budget(self, config: SchedulerConfig, running: GenericSequence[Sequence]) -> int:
        """Tokens of one step, of what `config` says, which all under way share; as many as its decodes at least, and
        as whoever runs the most tokens again needs for one more."""
        most = config.max_num_batched_tokens
        if not self.staged or not config.enable_chunked_prefill:
            return most
        rows = sum(decode_rows(seq) for seq in running if decodes(seq))
        longest = max((seq.again + 1 for seq in running), default=0)
        return min(most, max(-(-most // self._steps), LEAST - (-rows // self._stages), longest))

    def ready(self, unfinished: list[Sequence]) -> list[Sequence]:
        """Sequences that the next step may have a part of."""
        if not self.staged:
            return unfinished
        chosen = set(self._decodes(unfinished, self._under_way(unfinished)))
        return [seq for seq in unfinished if not seq.in_flight and (seq in chosen or not decodes(seq))]

    def began(self, unfinished: list[Sequence]) -> None:
        """A step begins of what is `ready`."""
        under_way = self._under_way(unfinished)
        few = self._decodes(unfinished, under_way)
        self._decoding = [*under_way, few] if few else under_way

    def _under_way(self, unfinished: list[Sequence]) -> list[list[Sequence]]:
        """Decodes of each step that has any whose tokens are not known."""
        live = {seq for seq in unfinished if seq.in_flight}  # one that was aborted does not come back
        return [step for step in self._decoding if not live.isdisjoint(step)]

    def _decodes(self, unfinished: list[Sequence], under_way: list[list[Sequence]]) -> list[Sequence]:
        """Decodes of the next step."""
        most = min(self._stages, self._steps)
        share = -(-sum(map(decodes, unfinished)) // most)
        few = [seq for seq in unfinished if not seq.in_flight and decodes(seq)][:share]
        return few if len(few) >= share or len(under_way) < most else []


def budget_of(
    config: SchedulerConfig, pace: PrefillPace, portions: MicroBatches, running: GenericSequence[Sequence]
) -> int:
    """Tokens of the next step at most."""
    if not (pace.limits or portions.staged):
        return config.max_num_batched_tokens
    rows = sum(decode_rows(seq) for seq in running if decodes(seq)) if pace.limits else 0
    return pace.budget(rows, portions.budget(config, running))


def rows_of(seq: Schedulable, budget: int, chunked: bool) -> int:
    """How many tokens of `seq` the budget allows; of a draft that goes beyond it only a part: it is worth no more."""
    budget -= seq.again
    if budget <= 0:
        return 0
    need = seq.target - seq.computed
    need -= min(len(seq.draft.tokens), max(0, need - budget))
    if need > budget and not chunked:
        return 0
    return min(need, budget)


def taken(seq: Schedulable, count: int) -> int:
    """Rows that `count` tokens of `seq` take in a step."""
    return count and count + seq.again


def divide_budget(
    running: GenericSequence[T], budget: int, chunked: bool, head: T | None, urgency: Callable[[T], float]
) -> dict[T, int]:
    """Tokens of each of `running` in a step of `budget`: decodes, then prompts by `urgency`, smallest first.

    Among equals those nearest to their end come first, and one that needs more than half of what is left gets half as
    long as there are longer ones behind it, or `head`, the first that waits, could use the rest. So a long prompt keeps
    nobody out, and short ones are not cut. What is less urgent than `head` leaves it all that it needs.
    """
    counts, prompts = dict[T, int](), list[T]()
    for seq in running:
        need = seq.target - seq.computed
        if need <= 1 + len(seq.draft.tokens):  # it decodes
            counts[seq] = count = need if need + seq.again <= budget else rows_of(seq, budget, chunked)
            budget -= taken(seq, count)
        else:
            prompts.append(seq)
    prompts.sort(key=lambda seq: (urgency(seq), seq.target - seq.computed))
    for seq, behind in zip(prompts, [*prompts[1:], None], strict=False):
        if head is not None and urgency(head) < urgency(seq):
            budget -= min(budget, head.target - head.computed)
            head = None
        equals = [other for other in (behind, head) if other is not None and urgency(other) == urgency(seq)]
        most = max(1, budget // 2) if chunked and equals else budget
        counts[seq] = rows_of(seq, min(most, budget), chunked)
        budget -= taken(seq, counts[seq])
    return counts
