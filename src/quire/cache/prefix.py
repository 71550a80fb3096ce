"""The prefix cache: full blocks are found again by a hash chain over the tokens that led to them.

The hash is keyed with a secret of this process and salted per tenant, so that no client can craft a
collision or probe another tenant's prompts; the tokens are compared after every match all the same.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array

from quire.cache.blocks import BlockPool
from quire.core.sequence import Sequence

KEY_BYTES = 16


class PrefixCache:
    """Finds and publishes the full blocks of sequences in `pool`."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.queries = 0
        self.hits = 0
        self._secret = secrets.token_bytes(32)

    def match(self, seq: Sequence) -> list[int]:
        """The longest run of published blocks that holds a prefix of `seq`; does not take ownership.

        Counts queried and hit tokens. The last token is always left to compute, for its logits.
        """
        blocks: list[int] = []
        size = self.block_size
        for i, key in enumerate(self._keys(seq, len(seq.tokens) // size)):
            block = self.pool.find(key, seq.tokens[i * size : (i + 1) * size])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count(self, seq: Sequence, hit_tokens: int) -> None:
        """Record a lookup that was used."""
        self.queries += len(seq.tokens)
        self.hits += hit_tokens

    def publish(self, seq: Sequence) -> None:
        """Publish the blocks of `seq` that became full; call only once their values are in the cache."""
        size = self.block_size
        full = min(seq.computed, len(seq.tokens)) // size
        if full <= seq.published:
            return
        keys = self._keys(seq, full)
        for i in range(max(seq.published, seq.slid), full):
            if self.pool.writable(seq.blocks[i]):
                self.pool.publish(seq.blocks[i], keys[i], seq.tokens[i * size : (i + 1) * size])
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
