"""How the tokens of a step are shared: decodes first, then prompts, of which a long one leaves room for others."""

from __future__ import annotations

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


def shares(running: Rows[Sequence], budget: int, chunked: bool, others: bool) -> dict[Sequence, int]:
    """Tokens of each of `running` in a step of `budget`: decodes, then prompts, those nearest to their end first.

    A prompt that needs more than half of what is left gets half as long as there are longer ones behind it, or `others`
    that wait could use the rest. So a long prompt keeps nobody out, and short ones are not cut.
    """
    counts, prompts = dict[Sequence, int](), list[Sequence]()
    for seq in running:
        if decodes(seq):
            counts[seq] = rows_of(seq, budget, chunked)
            budget -= counts[seq]
        else:
            prompts.append(seq)
    prompts.sort(key=lambda seq: seq.target - seq.computed)
    for place, seq in enumerate(prompts, 1):
        most = budget if not chunked or not (others or place < len(prompts)) else max(1, budget // 2)
        counts[seq] = rows_of(seq, min(most, budget), chunked)
        budget -= counts[seq]
    return counts
