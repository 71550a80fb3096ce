"""Keys and values that stay tensors of autograd's graph, and attention over them: for the differentiable backend.

A paged cache is written in place, which cuts the graph. Here rows lie in the order in which they came, and a slot is
where a row is looked up: block tables thus mean what they mean over a paged cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.core.windows import first_seen
from quire.ops.attention_spec import AttentionSpec
from quire.ops.layout import KVCache, KVLayout

ONE_BY_ONE, TOGETHER = 1, 0
"""Each row of a span sees one key more than the row before it; all rows see the same keys."""


@dataclass(frozen=True, eq=False)
class AutogradCache(KVCache):
    """A cache of one layer that holds what was written as it is: (slots [t] int64, keys [t, ...], values [t, ...])."""

    written: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, layout: KVLayout) -> AutogradCache:
        """An empty one. Of `layout` the sizes of a head and of a block count."""
        return cls(layout, torch.empty(0), torch.empty(0))

    def head(self, index: int) -> AutogradCache:
        """Keys and values of one head alone."""
        own = slice(index, index + 1)
        rows = [(slots, keys[:, own], values[:, own]) for slots, keys, values in self.written]
        return AutogradCache(replace(self.layout, kv_heads=1), self.keys, self.values, rows)

    def put(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Rows for `slots` [t] int64, -1: for none. A slot that is written again has the later row."""
        kept = slots >= 0
        self.written.append((slots[kept], keys[kept], values[kept]))

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """(row of each slot, int64; keys and values of all rows)."""
        slots, keys, values = (torch.cat(parts) for parts in zip(*self.written, strict=True))
        place = torch.full((int(slots.max()) + 1 if len(slots) else 0,), -1)
        place[slots] = torch.arange(len(slots))
        return place, keys, values


def held(cache: KVCache) -> AutogradCache:
    """`cache`; `TypeError` where it is one that cuts the graph."""
    if not isinstance(cache, AutogradCache):
        raise TypeError("the differentiable backend writes to AutogradCache only")
    return cache


@dataclass(frozen=True)
class KeySpan:
    """n rows begin..end that read the slots `keys` [m] int64: by `order` row i the first m - n + 1 + i, or all."""

    begin: int
    end: int
    keys: Tensor
    order: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Spans of one shape are computed together."""
        return self.end - self.begin, len(self.keys), self.order


def spans(cu_q: Tensor, context: Tensor, block_tables: Tensor, size: int) -> list[KeySpan]:
    """The batch of `ops.attention` as spans. Sequences of one row over the same keys (an encoder's) become one."""
    ends, lengths, found = cu_q.tolist(), context.tolist(), list[KeySpan]()
    last = -1
    for s, length in enumerate(lengths):
        begin, end = ends[s], ends[s + 1]
        if begin == end:
            continue
        same = last >= 0 and end - begin == 1 and lengths[last] == length and found[-1].end == begin
        if same and found[-1].shape[2] == TOGETHER and torch.equal(block_tables[s], block_tables[last]):
            found[-1] = KeySpan(found[-1].begin, end, found[-1].keys, TOGETHER)
            continue
        blocks = block_tables[s, : -(-length // size)].long()
        keys = (blocks[:, None] * size + torch.arange(size)).flatten()[:length]
        found.append(KeySpan(begin, end, keys, TOGETHER if end - begin == 1 else ONE_BY_ONE))
        last = s
    return found


def attend(q: Tensor, held: tuple[Tensor, Tensor, Tensor], batch: list[KeySpan], spec: AttentionSpec) -> Tensor:
    """softmax(scores) v of queries q [T, heads, d] over `AutogradCache.rows`, keys [N, kv_heads, d]: [T, heads, d of
    values]."""
    place, keys, values = held
    groups: dict[tuple[int, int, int], list[KeySpan]] = {}
    for span in batch:
        groups.setdefault(span.shape, []).append(span)
    order, parts = list[Tensor](), list[Tensor]()
    for shape, members in groups.items():
        rows = torch.tensor([m.begin for m in members])[:, None] + torch.arange(shape[0])
        at = place[torch.stack([m.keys for m in members])]
        parts.append(_attend(q[rows], keys[at], values[at], shape[2], spec).flatten(0, 1))
        order.append(rows.flatten())
    if not parts:
        return q.new_zeros((0, q.shape[1], values.shape[-1]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)[torch.cat(order).argsort()]


def _attend(q: Tensor, k: Tensor, v: Tensor, order: int, spec: AttentionSpec) -> Tensor:
    """q [S, n, heads, d] over k [S, m, kv_heads, d] and v [S, m, kv_heads, dv]: [S, n, heads, dv]."""
    n, m, repeat = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    row = torch.arange(m - n, m) if order == ONE_BY_ONE else torch.full((n,), m - 1)
    seen = torch.arange(m)
    if spec.window:  # what no row sees may never have been written
        lowest = torch.tensor([first_seen(spec.window, i) for i in row.tolist()])
        seen = seen[int(lowest.min()) :]
        k, v, m = k[:, :, -len(seen) :], v[:, :, -len(seen) :], len(seen)
    distance = row[:, None] - seen
    hidden = distance < -spec.after
    if spec.window:
        hidden = hidden | (seen < lowest[:, None])
    if not spec.softcap and spec.sinks is None and spec.alibi is None and spec.bias is None:
        causal = n == m and order == ONE_BY_ONE and not spec.window and not spec.after
        mask = None if causal or not bool(hidden.any()) else ~hidden
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=spec.scale, enable_gqa=repeat > 1
        )
        return out.transpose(1, 2)
    scores = q @ k.repeat_interleave(repeat, 1).transpose(2, 3) * spec.scale
    if spec.softcap:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if spec.alibi is not None:
        scores = scores - spec.alibi[:, None, None] * distance.abs()
    if spec.bias is not None:
        scores = scores + spec.bias[:, (distance + spec.behind).clamp(0, spec.bias.shape[1] - 1)]
    scores = scores.masked_fill(hidden, -torch.inf)
    if spec.sinks is not None:
        scores = torch.cat((scores, spec.sinks[:, None, None].expand(len(q), -1, n, 1)), -1)
    return (scores.softmax(-1)[..., :m] @ v.repeat_interleave(repeat, 1)).transpose(1, 2)
