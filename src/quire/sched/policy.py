"""Orders in which waiting sequences are admitted; the reverse order picks who is preempted."""

from __future__ import annotations

from quire.core.sequence import Sequence


def order_key(policy: str, seq: Sequence, ticket: int) -> tuple[float, int, int]:
    """Sort key, smallest first. `ticket` counts requests in order of arrival; a preempted sequence keeps its place."""
    rank = float(seq.request.priority) if policy == "priority" else 0.0
    return (rank, ticket, seq.index)
