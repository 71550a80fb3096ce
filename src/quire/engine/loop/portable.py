"""When a request may leave for another engine: its prompt is computed, and a store that others read has its blocks."""

from __future__ import annotations

import time

from quire.cache.tiers import Store
from quire.core.sequence import Sequence
from quire.sched.scheduler import Scheduler

WAIT_SECONDS = 2.0
"""For blocks to be written; whoever goes on without them computes what is missing."""


class Portable:
    """Watches the requests of one engine until they may leave. They decode here meanwhile, so no client waits."""

    def __init__(self, scheduler: Scheduler, store: Store) -> None:
        self._scheduler, self._store = scheduler, store
        self._since: dict[str, float | None] = {}

    def add(self, request_id: str) -> None:
        """A request was queued."""
        self._since[request_id] = None

    def take(self) -> tuple[str, ...]:
        """Those that may leave since the last call."""
        found = []
        for name, since in list(self._since.items()):
            seqs = self._scheduler.requests.get(name)
            if seqs is None:
                del self._since[name]
            elif all(len(seq.tokens) > seq.prompt_len for seq in seqs):
                self._since[name] = since = since or time.monotonic()
                if any(map(self._shared, seqs)) or time.monotonic() - since > WAIT_SECONDS:
                    del self._since[name]
                    found.append(name)
        return tuple(found)

    def _shared(self, seq: Sequence) -> bool:
        """Whether others find the last whole block of the prompt; those before it were written earlier."""
        tables = self._scheduler.tables
        blocks, prefix = seq.prompt_len // tables.block_size, tables.prefix
        assert prefix is not None, "a store keeps what prefixes find"
        if not blocks:
            return True
        groups = range(len(tables.sizes.windows))
        return seq.published >= blocks and all(
            self._store.shared(prefix.wanted_at(seq, blocks - 1, group).key) for group in groups
        )
