"""Drafts of sequences whose output follows a grammar."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from quire.core.blame import Failed, fail
from quire.core.sequence import Sequence
from quire.text.structured.guide import Guide


def forced(seqs: Rows[Sequence], limits: Rows[int], failed: Failed) -> dict[Sequence, list[int]]:
    """Tokens that a grammar leaves no choice about, at most as many as `limits` says: a draft that nobody guesses.

    A model that drafts would miss them in its own cache, so this is for those that look drafts up. Sequences whose
    grammar fails join `failed`.
    """
    found: dict[Sequence, list[int]] = {}
    for seq, limit in zip(seqs, limits, strict=True):
        guide = seq.guide
        if limit <= 0 or not isinstance(guide, Guide):
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
    if not seq.draft.tokens or not isinstance(guide, Guide) or not guide.follow(seq.tokens, seq.prompt_len):
        return
    if not seq.draft.parents:
        seq.draft.prune(list(range(guide.may(seq.draft.tokens))))
        return
    branches = (seq.draft.branch(node) for node in range(len(seq.draft.tokens)))
    seq.draft.prune([way[-1] for way in branches if guide.may([seq.draft.tokens[node] for node in way]) == len(way)])
