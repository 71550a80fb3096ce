"""The prefix cache: full blocks are found again by a hash chain over the tokens that led to them.

The hash is keyed with a secret of this process and salted per tenant, so that no client can craft a
collision or probe another tenant's prompts; the tokens are compared after every match all the same.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from itertools import takewhile

from quire.cache.blocks import BlockPool
from quire.core.sequence import SLID_OUT, Sequence

KEY_BYTES = 16


class PrefixCache:
    """Finds and publishes the full blocks of sequences in `pool`."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.queries = 0
        self.hits = 0
        self._secret = secrets.token_bytes(32)

    def match(self, seq: Sequence, windows: tuple[int, ...]) -> list[list[int]]:
        """The longest prefix of `seq` of which every group of layers finds what its next rows would see.

        `windows`: tokens each group sees, 0 = all. One table per group, all of one length, SLID_OUT before the window;
        does not take ownership. The last token is always left to compute, for its logits.
        """
        keys = self._keys(seq, len(seq.tokens) // self.block_size)
        count, tables = len(keys), dict[int, list[int]]()
        # Groups that see everything end at their first miss, which bounds the others.
        for group in sorted(range(len(windows)), key=lambda g: windows[g] > 0):
            held = (self._find(seq, i, keys[i], group) for i in range(count))
            tables[group] = list(held if windows[group] else takewhile(lambda block: block != SLID_OUT, held))
            count = min(count, len(tables[group]))
        starts = {group: _run_starts(tables[group]) for group, window in enumerate(windows) if window}
        while count and any(start[count - 1] > self._first(seq, count, windows[g]) for g, start in starts.items()):
            count -= 1
        firsts = [self._first(seq, count, window) for window in windows]
        return [[SLID_OUT] * first + tables[group][first:count] for group, first in enumerate(firsts)]

    def _find(self, seq: Sequence, i: int, key: bytes, group: int) -> int:
        """The block of `group` that holds the i-th block of tokens, or SLID_OUT."""
        size = self.block_size
        block = self.pool.find(_of_group(key, group), seq.tokens[i * size : (i + 1) * size])
        return SLID_OUT if block is None else block

    def _first(self, seq: Sequence, count: int, window: int) -> int:
        """The first block that the row after `count` blocks sees."""
        computed = min(count * self.block_size, len(seq.tokens) - 1)
        return max(0, computed - window + 1) // self.block_size if window else 0

    def count(self, seq: Sequence, hit_tokens: int) -> None:
        """Record a lookup that hit, or after which the sequence began without; one that waits looks at every step."""
        self.queries += len(seq.tokens)
        self.hits += hit_tokens

    def publish(self, seq: Sequence, upto: int) -> None:
        """Publish the full blocks of positions 0 .. upto - 1; call only once their values are in the cache."""
        size = self.block_size
        full = upto // size
        if full <= seq.published:
            return
        keys = self._keys(seq, full)
        for group, table in enumerate(seq.blocks):
            for i in range(max(seq.published, seq.slid[group]), full):
                if self.pool.writable(table[i]):
                    self.pool.publish(table[i], _of_group(keys[i], group), seq.tokens[i * size : (i + 1) * size])
        seq.published = full

    def _keys(self, seq: Sequence, count: int) -> list[bytes]:
        keys = seq.keys
        parent = keys[-1] if keys else self._root(seq)
        size = self.block_size
        for i in range(len(keys), count):
            tokens = array("q", seq.tokens[i * size : (i + 1) * size]).tobytes()
            parent = hashlib.blake2b(parent + tokens, key=self._secret, digest_size=KEY_BYTES).digest()
            keys.append(parent)
        return keys[:count]

    def _root(self, seq: Sequence) -> bytes:
        # Keys and values depend on the adapter: a name is hashed with its length, so that no salt can imitate one.
        adapter = seq.request.adapter.encode()
        salt = len(adapter).to_bytes(4, "little") + adapter + seq.request.cache_salt.encode()
        return hashlib.blake2b(salt, key=self._secret, digest_size=KEY_BYTES).digest()


def _of_group(key: bytes, group: int) -> bytes:
    """The key of the block that holds the same tokens for the layers of `group`."""
    return key + bytes((group,)) if group else key


def _run_starts(table: list[int]) -> list[int]:
    """For each entry, where the unbroken run of blocks that ends with it begins; past it where it has no block."""
    starts, start = [], 0
    for i, block in enumerate(table):
        start = i + 1 if block == SLID_OUT else start
        starts.append(start)
    return starts
