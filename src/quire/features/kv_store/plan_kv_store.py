"""What a store of blocks plans: sequences wait for their blocks, and what is done with blocks before the next plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from quire.cache.tables import BlockTables
from quire.cache.tiers import StoreKey, StoreRead
from quire.core.errors import QuireError
from quire.core.sequence import Sequence, Status


class StoreQueue:
    """Where sequences wait for their blocks.

    It asks for what a store has of a sequence, piece by piece; each piece becomes blocks that any sequence may find.
    `most` sequences may wait at one time. Where the tables have no tiers nothing ever comes back.
    """

    status: ClassVar[Status] = Status.WAITING_FOR_STORE

    def __init__(self, tables: BlockTables, most: int) -> None:
        self._tables, self._tiers, self._most = tables, tables.tiers, most
        self._under_way: dict[Sequence, tuple[StoreRead, list[StoreKey]]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, seq: Sequence, siblings: Iterable[Sequence]) -> bool:
        """Whether `seq` is to wait for blocks, rather than to compute what it does not find in the cache."""
        tiers = self._tiers
        if tiers is None or seq.kv.recalled > seq.times.preemptions or len(self) >= self._most:
            return False
        seq.kv.recalled = seq.times.preemptions + 1
        wanted, tokens = self._tables.stored(seq, tiers.store.has)
        if not wanted or not tiers.rates.pays(tiers.sizes.total(wanted), tokens):
            return False
        self._next(seq, wanted)
        return True

    def returned(self) -> tuple[list[Sequence], list[tuple[Sequence, QuireError]]]:
        """Sequences that have what they waited for, or what there was; it is theirs once the next plan is prepared.
        Nobody fails."""
        ready = []
        for seq, (reading, rest) in list(self._under_way.items()):
            if not reading.done.is_set():
                continue
            assert self._tiers is not None
            del self._under_way[seq]
            rest = rest if len(reading.found) == len(reading.wanted) else []
            self._tables.restore(seq, reading.found, rest)
            self._tiers.ended(reading)
            if rest:
                self._next(seq, rest)
            else:
                self._tables.take_prefix(seq)
                ready.append(seq)
        return ready, []

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence that waits."""
        reading, _ = self._under_way.pop(seq)
        assert self._tiers is not None
        self._tiers.drop(reading)

    def drop_all(self) -> list[Sequence]:
        """Forget all of them, which compute instead."""
        seqs = list(self._under_way)
        for seq in seqs:
            self.drop(seq)
        return seqs

    def _next(self, seq: Sequence, wanted: list[StoreKey]) -> None:
        assert self._tiers is not None
        piece = self._tiers.piece
        self._under_way[seq] = self._tiers.read(wanted[:piece]), wanted[piece:]
