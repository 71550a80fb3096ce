"""Who may join those that run, and who leaves for one that is more urgent."""

from __future__ import annotations

from quire.cache.tables import BlockTables, added
from quire.core.config import SchedulerConfig
from quire.core.errors import ContextTooLong
from quire.core.request import longest_prompt
from quire.core.sequence import Sequence
from quire.sched.policy import Policy
from quire.sched.queues import SequenceQueues
from quire.sched.token_budget import decodes, rows_of


def check_length(prompt: int, tables: BlockTables, longest: int, pooled: bool = False) -> None:
    """`ContextTooLong` for a prompt of so many tokens that could never run; `longest`: tokens of a sequence."""
    most = longest_prompt(longest, pooled)
    if not 1 <= prompt <= most:
        raise ContextTooLong(f"prompt: {prompt} tokens; this model takes 1 to {most}", param="prompt")
    if tables.sizes.footprint(prompt + 1) > tables.pool.num_blocks:
        capacity = tables.sizes.capacity(tables.pool.num_blocks, longest)
        raise ContextTooLong(f"prompt: {prompt} tokens; the KV cache holds {capacity}", param="prompt")


class BatchAdmission:
    """Looks at the sequences that run and those that wait; only `next`, `fits` and `gives_way` change who has blocks.

    `closed`: the first of a static batch has left, and nobody joins before all of it have.
    """

    def __init__(self, config: SchedulerConfig, tables: BlockTables, room: SequenceQueues, policy: Policy) -> None:
        self._config, self._tables, self._policy = config, tables, policy
        self._room, self._running, self._waiting = room, room.running, room.queue
        self.closed = False

    def check(self, seq: Sequence, longest: int) -> None:
        """`ContextTooLong` where a new sequence could never run; `longest`: tokens that the model takes."""
        length, tables = seq.prompt_len, self._tables
        check_length(length, tables, longest, seq.request.pooling is not None)
        most = seq.request.params.max_tokens or 1
        if seq.request.grammar and tables.sizes.footprint(length + most - 1) > tables.pool.num_blocks:
            capacity = tables.sizes.capacity(tables.pool.num_blocks, longest)
            raise ContextTooLong(  # a text that outgrew the cache would end in the middle
                f"max_tokens: {length} prompt tokens and {most} more, but the KV cache holds {capacity}",
                param="max_tokens",
            )

    def next(self, budget: int) -> tuple[Sequence, int] | None:
        """Who is to be admitted, with the blocks that it found, and of how many rows of `budget`; None: nobody now."""
        if self.closed and self._config.static_batching:
            return None
        while self._room.queued and budget and not self.full:
            seq = self._waiting.head()
            if not seq.kv.blocks:
                if self._room.recall_head():
                    continue
                self._tables.take_prefix(seq)
                self._room.holds(seq)
            count = rows_of(seq, budget, self._config.enable_chunked_prefill)
            return (seq, count) if count and self.fits(seq) else None
        return None

    def fits(self, seq: Sequence) -> bool:
        """Whether the whole rest of a waiting sequence has room now, and each table of a running one to grow."""
        return self._has_room(seq) or (self._room.reclaim(seq) and self._has_room(seq))

    def _has_room(self, seq: Sequence) -> bool:
        """Whether the blocks are free that `seq` needs, those that running prompts lack, and some for growth.

        Admitting a part on hope would preempt what was just computed.
        """
        spare, pool = len(self._running) * len(self._tables.sizes.windows), self._tables.pool
        if spare > min(pool.free):
            return False
        if self._tables.states is not None and not self._tables.states.fit((seq,)):
            return False
        need = added(self._tables.lacking(each) for each in (seq, *(s for s in self._running if not decodes(s))))
        return pool.fits(need, spare)

    @property
    def full(self) -> bool:
        """Whether as many run as may."""
        return len(self._running) >= self._config.max_num_seqs

    def may_admit(self) -> bool:
        """Whether one that waits could use a part of the step."""
        if not len(self._waiting) or self.full or self._config.static_batching:
            return False
        return self._has_room(self._waiting.head())

    def displaced(self) -> Sequence | None:
        """Who is in the way of one that waits and finds no room as it is, if the policy says that anybody is."""
        if not self._running or not len(self._waiting):
            return None
        head = self._waiting.head()
        seq = self._policy.displaced(self._running, head, self._config.max_num_seqs)
        return seq if seq is not None and (self.full or not self._has_room(head)) else None

    def gives_way(self) -> Sequence | None:
        """Who is to be preempted for one that waits: whoever is `displaced`, unless blocks of others that wait do."""
        seq = self.displaced()
        return seq if seq is not None and (self.full or not self.fits(self._waiting.head())) else None
