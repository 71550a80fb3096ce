"""Who uses which LoRA adapter: sequences of the batch and of the queue, and requests that are not finished."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as GenericSequence

from quire.core.sequence import Sequence


class QueuedAdapters:
    """Counts sequences of the queue by the LoRA adapter that they use."""

    def __init__(self) -> None:
        self._users = Counter[str]()

    @property
    def names(self) -> tuple[str, ...]:
        """Adapters that somebody in the queue uses."""
        return tuple(sorted(self._users))

    def joins(self, seq: Sequence) -> None:
        """`seq` is in the queue now."""
        if seq.request.adapter:
            self._users[seq.request.adapter] += 1

    def leaves(self, seq: Sequence) -> None:
        """`seq` is no longer in the queue."""
        if name := seq.request.adapter:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]


def adapters_of(sequences: Iterable[Sequence]) -> tuple[str, ...]:
    """Names of the LoRA adapters that they use."""
    return tuple(sorted({seq.request.adapter for seq in sequences} - {""}))


def requests_with(name: str, requests: Iterable[GenericSequence[Sequence]]) -> int:
    """How many of `requests`, each given by its sequences, use the adapter `name`."""
    return sum(first.request.adapter == name for first, *_ in requests)
