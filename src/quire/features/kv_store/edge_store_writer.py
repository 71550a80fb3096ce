"""When blocks go to the store behind an engine's cache, and which requests may leave once they are there."""

from __future__ import annotations

import atexit
import logging
import time
import weakref

from quire.cache.tiers import Store
from quire.core.offload import FLUSH_SECONDS
from quire.core.plan import NO_WORK, StepPlan
from quire.core.sequence import Sequence
from quire.features.kv_store.edge_block_store import BEHIND_BYTES, BlockStore
from quire.run.runner import Runner
from quire.sched.scheduler import Scheduler
from quire.sched.token_budget import is_decode_chunk

log = logging.getLogger(__name__)

WAIT_SECONDS = 2.0
"""For blocks to be written; whoever goes on without them computes what is missing."""
ENDED = 64
"""Requests that have ended, beside as many as there are, before they are forgotten."""


class StoreWriter:
    """Writes what `scheduler`'s blocks hold to `store` while an engine has nothing else to do."""

    def __init__(self, store: BlockStore, scheduler: Scheduler, runner: Runner) -> None:
        self.store, self.tiers = store, store.tiers
        self._scheduler, self._runner, self._closed = scheduler, runner, False
        _LIVE.add(self)

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """The step of `plan` took so long: what computing costs."""
        prompts = sum(chunk.count for chunk in plan.chunks if not is_decode_chunk(chunk))
        self.tiers.rates.computed(prompts, plan.num_tokens, seconds)

    def write_behind(self) -> bool:
        """Keep some more of what can be found, while there is no work; whether there is yet more."""
        more = self.tiers.behind(BEHIND_BYTES)
        self._runner.move_blocks(self._scheduler.block_work.take(more=more))
        return self.tiers.unsaved > 0

    def forget(self) -> None:
        """Later requests find nothing of what was kept. What is being read comes too late."""
        self._scheduler.room.compute_instead()
        tables = self._scheduler.tables
        tables.forget_all()
        if tables.prefix is not None:
            tables.prefix.rekey(self.store.secret)

    def close(self, seconds: float = FLUSH_SECONDS) -> None:
        """Keep all that can be found, for so long at most. May be called twice."""
        if self._closed:
            return
        self._closed = True
        end = time.monotonic() + seconds
        try:
            while self.write_behind() and time.monotonic() < end:
                if self.tiers.store.full():
                    self.tiers.store.settle()
            self._runner.move_blocks(NO_WORK)
        except ValueError as error:  # a rank has ended: nobody has its part of what is left
            log.warning("blocks that no store has are not kept: %s", error)
        self.tiers.close(max(0.1, end - time.monotonic()))


_LIVE: weakref.WeakSet[StoreWriter] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for tiering in list(_LIVE):
        tiering.close()


class LeavingRequests:
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
        """Take the requests that may leave since the last call. Who waits is not looked at: prompts are computed by
        who runs."""
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
        """Whether others find the last whole block of the prompt, and the state behind it; those before it were written
        earlier."""
        tables = self._scheduler.tables
        blocks, prefix = seq.prompt_len // tables.block_size, tables.prefix
        assert prefix is not None, "a store keeps what prefixes find"
        if not blocks:
            return True
        if seq.kv.published < blocks:
            return False
        wanted = [prefix.wanted_at(seq, blocks - 1, group) for group in range(len(tables.sizes.windows))]
        if tables.states is not None and (whole := (seq.prompt_len - 1) // tables.block_size):
            wanted.append(prefix.wanted_state(seq, whole))
        return all(self._store.shared(want.key) for want in wanted)
