"""How the tokens of a step are shared: decodes first, then prompts, of which a long one leaves room for others."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows

from quire.core.plan import Chunk
from quire.core.sequence import Sequence


def decodes(seq: Sequence) -> bool:
    """Whether all but its last token and its draft are computed: it is one row away from a token."""
    return seq.target - seq.computed <= 1 + len(seq.draft)


def drew(chunk: Chunk) -> bool:
    """Whether a chunk is a token's row, with its draft, and not of a prompt."""
    return chunk.count == chunk.logits and chunk.start >= chunk.seq.prompt_len


def rows_of(seq: Sequence, budget: int, chunked: bool) -> int:
    """How many tokens of `seq` the budget allows; a draft that goes beyond it is cut: it is worth only its rows."""
    if not budget:
        return 0
    need = seq.target - seq.computed
    if need > budget and seq.draft:
        del seq.draft[max(0, len(seq.draft) - need + budget) :]
        need = seq.target - seq.computed
    if need > budget and not chunked:
        return 0
    return min(need, budget)


def shares(
    running: Rows[Sequence], budget: int, chunked: bool, head: Sequence | None, urgency: Callable[[Sequence], float]
) -> dict[Sequence, int]:
    """Tokens of each of `running` in a step of `budget`: decodes, then prompts by `urgency`, smallest first.

    Among equals those nearest to their end come first, and one that needs more than half of what is left gets half as
    long as there are longer ones behind it, or `head`, the first that waits, could use the rest. So a long prompt keeps
    nobody out, and short ones are not cut. What is less urgent than `head` leaves it all that it needs.
    """
    counts, prompts = dict[Sequence, int](), list[Sequence]()
    for seq in running:
        if decodes(seq):
            counts[seq] = rows_of(seq, budget, chunked)
            budget -= counts[seq]
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
        budget -= counts[seq]
    return counts
