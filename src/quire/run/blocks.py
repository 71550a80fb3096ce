"""Whole blocks of the KV cache in all layers: moved, saved, wiped, filled and copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.cache.tiers import StoreSizes
from quire.core.plan import BlockWork, Save
from quire.ops.backend import Ops
from quire.run.caches import Caches

Bytes = NDArray[np.uint8]
Later = Callable[[], Bytes]
"""Waits for a copy, and returns it."""
Keep = Callable[[Save, Bytes], None]
"""Takes the content of a block, or a recurrent state, to a store."""


class BlockBytes(Protocol):
    """The bytes of whole blocks, or of slots of states, wherever their parts are: out of the cache for a store, and
    back."""

    nbytes: int

    def copy(self, block: int) -> Later:
        """What `block` holds now, uint8 [nbytes]."""
        ...

    def fill(self, block: int, data: Any) -> None:
        """Make `block` hold what `copy` gave, as anything with a buffer of `nbytes` bytes."""
        ...


class StoredBytes(NamedTuple):
    """The bytes of what a store keeps: of blocks, and of slots of recurrent states where the model has any."""

    blocks: BlockBytes
    states: BlockBytes | None = None

    @property
    def sizes(self) -> StoreSizes:
        """Bytes of a block, and of a slot."""
        return StoreSizes(self.blocks.nbytes, 0 if self.states is None else self.states.nbytes)

    def of(self, state: bool) -> BlockBytes:
        """The bytes of blocks, or of slots of states."""
        found = self.states if state else self.blocks
        assert found is not None, "no state is saved where there is none"
        return found


class Blocks:
    """The one door to what is done with whole blocks, whoever asks: steps, drafts, and a store while nothing runs."""

    def __init__(self, caches: Caches, ops: Ops, stored: StoredBytes | None = None) -> None:
        """`stored`: the bytes of blocks, where a store keeps any; `coming`: copies that are under way."""
        self.stored, self._caches, self._queues = stored, caches, ops.queues
        self.coming: list[tuple[Save, Later]] = []

    def apply(self, work: BlockWork, keep: Keep | None = None) -> None:
        """Do `work`; `keep` gets what is saved.

        On a GPU that is what earlier calls saved, for copies are queued and nobody waits for them: call it once more
        with no work at the end.
        """
        caches = self._caches
        if work.moves:
            caches.move(work.moves)
        if self.stored is not None:
            self._save(self.stored, work.saves, keep)
        if work.wipes:
            caches.zero(work.wipes)
        for fill in work.fills:
            assert self.stored is not None, "what comes back was saved before"
            self.stored.of(fill.state).fill(fill.block, fill.data)
        if work.copies:
            caches.copy(work.copies)

    def _save(self, stored: StoredBytes, saves: Sequence[Save], keep: Keep | None) -> None:
        copied = [(save, stored.of(save.state).copy(save.block)) for save in saves]
        ready, self.coming = (self.coming, copied) if self._queues else (copied, [])
        for save, data in ready:
            found = data()
            if keep is not None:
                keep(save, found)
