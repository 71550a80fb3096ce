"""The block table of each sequence: grown, shared, copied on write, released."""

from __future__ import annotations

from quire.cache.blocks import BlockPool
from quire.cache.prefix import PrefixCache
from quire.core.sequence import Sequence

SLID_OUT = -1


class BlockTables:
    """The one writer of `Sequence.blocks`, `computed` (downwards only), `published` and `slid`.

    `window` > 0 means that every layer attends to the last `window` tokens only, so that blocks which slid out are
    freed (their table entry becomes SLID_OUT and is never read again).
    """

    def __init__(self, pool: BlockPool, prefix: PrefixCache | None, block_size: int, window: int = 0) -> None:
        self.pool = pool
        self.prefix = prefix
        self.block_size = block_size
        self.window = window

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def missing(self, seq: Sequence, upto: int) -> int:
        """How many blocks must be allocated so that positions computed .. upto - 1 may be written."""
        need = self.blocks_for(upto)
        shared = sum(not self.pool.writable(b) for b in seq.blocks[seq.computed // self.block_size : need])
        return max(0, need - len(seq.blocks)) + shared

    def reserve(self, seq: Sequence, upto: int, copies: list[tuple[int, int]]) -> bool:
        """Make positions computed .. upto - 1 writable: copy shared or published blocks, append new. All or nothing."""
        if self.missing(seq, upto) > self.pool.num_free:
            return False
        for i in range(seq.computed // self.block_size, self.blocks_for(upto)):
            if i == len(seq.blocks):
                seq.blocks.append(self.pool.allocate())
            elif not self.pool.writable(seq.blocks[i]):
                fresh = self.pool.allocate()
                copies.append((seq.blocks[i], fresh))
                self.pool.release(seq.blocks[i])
                seq.blocks[i] = fresh
                seq.published = min(seq.published, i)
        return True

    def release(self, seq: Sequence) -> None:
        """Give everything back; the tokens stay and may be computed again."""
        # Deepest first: a later block of a chain is useless without the earlier ones, so it is to be evicted first.
        for block in reversed(seq.blocks):
            if block != SLID_OUT:
                self.pool.release(block)
        seq.blocks = []
        seq.computed = seq.published = seq.slid = 0

    def take_prefix(self, seq: Sequence) -> None:
        """Start from published blocks. A request for prompt logprobs computes everything, for it needs every logit."""
        if self.prefix is None or seq.request.params.prompt_logprobs is not None:
            return
        for block in self.prefix.match(seq):
            self.pool.acquire(block)
            seq.blocks.append(block)
        seq.published = len(seq.blocks)
        seq.computed = min(len(seq.blocks) * self.block_size, len(seq.tokens) - 1)
        self.prefix.count(seq, seq.computed)
        if seq.preemptions == 0:
            seq.cached_tokens = seq.computed
        self.slide(seq)

    def publish(self, seq: Sequence) -> None:
        """Let others find the full blocks of `seq`, whose values are known to be finite."""
        if self.prefix is not None:
            self.prefix.publish(seq)

    def slide(self, seq: Sequence) -> None:
        """Free the blocks that no future row of `seq` can see."""
        if not self.window:
            return
        keep = min(max(0, seq.computed - self.window + 1) // self.block_size, len(seq.blocks))
        for i in range(seq.slid, keep):
            self.pool.release(seq.blocks[i])
            seq.blocks[i] = SLID_OUT
        seq.slid = max(seq.slid, keep)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share the prompt's blocks.

        It computes the last prompt token again, for its own logits: that write copies the one block it changes, so
        that a fork needs no rule of its own.
        """
        child.blocks = parent.blocks[: self.blocks_for(child.prompt_len)]
        for block in child.blocks:
            if block != SLID_OUT:
                self.pool.acquire(block)
        child.computed = child.cached_tokens = child.prompt_len - 1
        child.slid = parent.slid
        child.published = min(parent.published, len(child.blocks))
        child.keys = parent.keys[: child.prompt_len // self.block_size]

    def unpublished(self, seq: Sequence) -> list[int]:
        """Blocks that only `seq` holds and nobody else can find."""
        return [b for b in seq.blocks if b != SLID_OUT and self.pool.writable(b)]
