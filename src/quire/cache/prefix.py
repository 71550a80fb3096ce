"""The prefix cache: full blocks are found again by a hash chain over the tokens that led to them.
See docs/design/kv-cache.md.

The hash is keyed with a secret of this process and salted per tenant, so that no client can craft a
collision or probe another tenant's prompts; the tokens are compared after every match all the same.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Callable
from itertools import takewhile

from quire.cache.blocks import KEY_BYTES, BlockPool, state_key
from quire.cache.tiers import StoreKey
from quire.core.request import Miss, MissKind
from quire.core.sequence import SLID_OUT, STORED, Sequence
from quire.core.windows import first_seen

ROOTS = 64
"""Pairs of adapter and salt that looked last, among which a miss is explained."""
Stored = Callable[[bytes], bool]
"""Whether a block of that key is beyond the pool."""


class PrefixCache:
    """Finds and publishes the full blocks of sequences in `pool`.

    `secret` of the chain: drawn for this process, unless keys are to mean the same in others. `identity`: what stands
    for an adapter in the chain; its name, as long as no adapter of that name is to be told from another's.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        secret: bytes = b"",
        identity: Callable[[str], str] = str,
        states: BlockPool | None = None,
    ) -> None:
        """`states`: slots of recurrent states, where the model has any."""
        self.pool, self.states = pool, states
        self.block_size = block_size
        self.queries = 0
        self.hits = 0
        self._roots: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._secret, self._identity = secret or secrets.token_bytes(32), identity

    def rekey(self, secret: bytes) -> None:
        """Find nothing under the keys there were."""
        self._secret = secret

    def match(self, seq: Sequence, windows: tuple[int, ...], stored: Stored | None = None) -> list[list[int]]:
        """The longest prefix of `seq` of which every group of layers finds what its next rows would see.

        `windows`: tokens each group sees, 0 = all. One table per group, all of one length, SLID_OUT before the window;
        does not take ownership. The last token is always left to compute, for its logits. `stored` says what there is
        beyond the pool: such blocks are STORED.
        """
        keys = self._keys(seq, len(seq.tokens) // self.block_size)
        count, tables = len(keys), dict[int, list[int]]()
        # Groups that see everything end at their first miss, which bounds the others.
        for group in sorted(range(len(windows)), key=lambda g: windows[g] > 0):
            held = (self._find(seq, i, keys[i], group, stored) for i in range(count))
            tables[group] = list(held if windows[group] else takewhile(lambda block: block != SLID_OUT, held))
            count = min(count, len(tables[group]))
        starts = {group: _run_starts(tables[group]) for group, window in enumerate(windows) if window}

        def lacks(count: int) -> bool:
            return any(start[count - 1] > self._first(seq, count, windows[g]) for g, start in starts.items())

        if self.states is not None:
            assert seq.state is not None
            count = min(count, (len(seq.tokens) - 1) // self.block_size)
            seq.state.shared = max(_end(table[:count]) for table in tables.values()) * self.block_size
        while count and (lacks(count) or (self.states is not None and not self._has_state(seq, count, stored))):
            count -= 1
        firsts = [self._first(seq, count, window) for window in windows]
        return [[SLID_OUT] * first + tables[group][first:count] for group, first in enumerate(firsts)]

    def state_after(self, seq: Sequence, count: int) -> int:
        """The slot with the recurrent state after `count` whole blocks of `seq`; -1 where there is none."""
        assert self.states is not None
        size = self.block_size
        found = self.states.find(state_key(seq.kv.keys[count - 1]), seq.tokens[(count - 1) * size : count * size])
        return -1 if found is None else found

    def _has_state(self, seq: Sequence, count: int, stored: Stored | None) -> bool:
        """Whether there is a recurrent state after `count` blocks, in a slot or in a store."""
        return self.state_after(seq, count) >= 0 or (stored is not None and stored(state_key(seq.kv.keys[count - 1])))

    def wanted(self, seq: Sequence, windows: tuple[int, ...], stored: Stored) -> tuple[list[StoreKey], int]:
        """What a store has beyond the pool of the prefix of `seq`, and how many tokens more that is; in order, and the
        recurrent state behind it last."""
        found = self.match(seq, windows, stored)
        count = len(found[0])
        blocks = [
            self.wanted_at(seq, i, group)
            for i in range(count)
            for group, table in enumerate(found)
            if table[i] == STORED
        ]
        if self.states is not None and count and self.state_after(seq, count) < 0:
            blocks.append(self.wanted_state(seq, count))
        more = count - len(self.match(seq, windows)[0]) if blocks else 0
        return (blocks, more * self.block_size) if more > 0 else ([], 0)

    def wanted_at(self, seq: Sequence, i: int, group: int) -> StoreKey:
        """The i-th block of tokens, as the layers of `group` hold it."""
        size = self.block_size
        return StoreKey(_of_group(seq.kv.keys[i], group), tuple(seq.tokens[i * size : (i + 1) * size]))

    def wanted_state(self, seq: Sequence, count: int) -> StoreKey:
        """The recurrent state after `count` blocks."""
        size = self.block_size
        return StoreKey(state_key(seq.kv.keys[count - 1]), tuple(seq.tokens[(count - 1) * size : count * size]))

    def _find(self, seq: Sequence, i: int, key: bytes, group: int, stored: Stored | None) -> int:
        """The block of `group` with the i-th block of tokens; STORED where a store has it, SLID_OUT where none does."""
        size = self.block_size
        block = self.pool.find(_of_group(key, group), seq.tokens[i * size : (i + 1) * size])
        if block is None:
            return STORED if stored is not None and stored(_of_group(key, group)) else SLID_OUT
        return block

    def _first(self, seq: Sequence, count: int, window: int) -> int:
        """The first block that the row after `count` blocks sees."""
        computed = min(count * self.block_size, len(seq.tokens) - 1)
        return first_seen(window, computed) // self.block_size

    def count(self, seq: Sequence, hit_tokens: int, windows: tuple[int, ...]) -> None:
        """Record a lookup that hit, or after which the sequence began without; one that waits looks at every step."""
        self.queries += len(seq.tokens)
        self.hits += hit_tokens
        if seq.request.explain != "no" and not seq.times.preemptions:
            seq.kv.miss = self._explain(seq, hit_tokens, windows)
        who = seq.request.adapter, seq.request.cache_salt
        self._roots[who] = None
        self._roots.move_to_end(who)
        if len(self._roots) > ROOTS:
            self._roots.popitem(last=False)

    def publish(self, seq: Sequence, upto: int) -> None:
        """Publish the full blocks of positions 0 .. upto - 1; call only once their values are in the cache."""
        size = self.block_size
        full = upto // size
        if full <= seq.kv.published:
            return
        keys = self._keys(seq, full)
        for group, table in enumerate(seq.kv.blocks):
            for i in range(max(seq.kv.published, seq.kv.slid[group]), full):
                if self.pool.writable(table[i]):
                    self.pool.publish(table[i], _of_group(keys[i], group), seq.tokens[i * size : (i + 1) * size])
        seq.kv.published = full

    def _explain(self, seq: Sequence, hit_tokens: int, windows: tuple[int, ...]) -> Miss | None:
        """Where the first token lies that was not found, and why (`MissKind`); None where only the last is computed.

        "partial_block": the rest fills no block, and only whole ones are shared. "evicted": its block, or one before it
        that layers with a window see, had to make room. "no_state": its block is there, and no recurrent state between
        it and the last block that is. "other_adapter", "other_tenant": it is there for the same tokens under another
        adapter or salt; of other salts only a request that asks for all hears.
        """
        first = hit_tokens // self.block_size
        if hit_tokens >= len(seq.tokens) - 1:
            return None
        if self.states is not None and seq.state is not None and (shared := seq.state.shared) > hit_tokens:
            key = state_key(self._keys(seq, shared // self.block_size)[-1])
            return Miss(hit_tokens, "evicted" if self.states.was_evicted(key) else "no_state", shared)
        if first == len(seq.tokens) // self.block_size:
            return Miss(hit_tokens, "partial_block")
        keys = self._keys(seq, first + 1)
        for group, window in enumerate(windows):
            seen = (_of_group(key, group) for key in keys[self._first(seq, first + 1, window) if window else first :])
            if any(self.pool.was_evicted(key) and not self.pool.published(key) for key in seen):
                return Miss(hit_tokens, "evicted")
        return Miss(hit_tokens, self._elsewhere(seq, first))

    def _elsewhere(self, seq: Sequence, block: int) -> MissKind:
        """Who else has `block` and all before it. Whoever does not have the first costs two digests."""
        adapter, salt = seq.request.adapter, seq.request.cache_salt
        for other in reversed(self._roots):
            if other == (adapter, salt) or (other[1] != salt and seq.request.explain != "all"):
                continue
            key = self._root(*other)
            for i in range(block + 1):
                key = self._after(key, seq, i)
                if not self.pool.published(key):
                    break
            else:
                return "other_adapter" if other[1] == salt else "other_tenant"
        return "never_seen"

    def _keys(self, seq: Sequence, count: int) -> list[bytes]:
        keys = seq.kv.keys
        parent = keys[-1] if keys else self._root(seq.request.adapter, seq.request.cache_salt)
        for i in range(len(keys), count):
            parent = self._after(parent, seq, i)
            keys.append(parent)
        return keys[:count]

    def _after(self, parent: bytes, seq: Sequence, i: int) -> bytes:
        """The key of the i-th block of tokens behind that of the block before."""
        tokens = array("q", seq.tokens[i * self.block_size : (i + 1) * self.block_size]).tobytes()
        return hashlib.blake2b(parent + tokens, key=self._secret, digest_size=KEY_BYTES).digest()

    def _root(self, adapter: str, salt: str) -> bytes:
        # Keys and values depend on the adapter: a name is hashed with its length, so that no salt can imitate one.
        name = self._identity(adapter).encode()
        return hashlib.blake2b(
            len(name).to_bytes(4, "little") + name + salt.encode(), key=self._secret, digest_size=KEY_BYTES
        ).digest()


def _of_group(key: bytes, group: int) -> bytes:
    """The key of the block that holds the same tokens for the layers of `group`."""
    return key + bytes((group,)) if group else key


def _run_starts(table: list[int]) -> list[int]:
    """Find for each entry where the unbroken run of blocks that ends with it begins; past it where it has no block."""
    starts, start = [], 0
    for i, block in enumerate(table):
        start = i + 1 if block == SLID_OUT else start
        starts.append(start)
    return starts


def _end(table: list[int]) -> int:
    """Find where the last block of `table` ends: so far somebody came, whose earlier blocks may have made room."""
    return next((i for i in range(len(table), 0, -1) if table[i - 1] != SLID_OUT), 0)
