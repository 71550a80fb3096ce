"""When a request may leave for another engine: its prompt is computed, and a store that others read has its blocks."""

from __future__ import annotations

import time

from quire.cache.tiers import Store
from quire.core.sequence import Sequence
from quire.sched.scheduler import Scheduler

WAIT_SECONDS = 2.0
"""For blocks to be written; whoever goes on without them computes what is missing."""
ENDED = 64
"""Requests that have ended, beside as many as there are, before they are forgotten."""


class Portable:
    """Watches the requests of one engine until they may leave. They decode here meanwhile, so no client waits."""

    def __init__(self, scheduler: Scheduler, store: Store) -> None:
        self._scheduler, self._store = scheduler, store
        self._begun = set[str]()  # whose prompts are not computed yet, and some that have ended
        self._since: dict[str, float] = {}

    def add(self, request_id: str) -> None:
        """A request was queued."""
        self._begun.add(request_id)
        if len(self._begun) > 2 * len(self._scheduler.requests) + ENDED:
            self._begun &= self._scheduler.requests.keys()

    def take(self) -> tuple[str, ...]:
        """Those that may leave since the last call. Who waits is not looked at: prompts are computed by who runs."""
        requests, now, found = self._scheduler.requests, time.monotonic(), list[str]()
        for name in dict.fromkeys(seq.request.id for seq in self._scheduler.running):
            if name in self._begun and all(len(seq.tokens) > seq.prompt_len for seq in requests[name]):
                self._begun.remove(name)
                self._since[name] = now
        for name, since in list(self._since.items()):
            seqs = requests.get(name)
            if seqs is None:
                del self._since[name]
            elif any(map(self._shared, seqs)) or now - since > WAIT_SECONDS:
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
        return seq.kv.published >= blocks and all(
            self._store.shared(prefix.wanted_at(seq, blocks - 1, group).key) for group in groups
        )
