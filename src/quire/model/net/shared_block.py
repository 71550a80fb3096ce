"""Attention and an MLP that several layers share (Zamba2, Glorioso et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.batch import Batch
from quire.model.net.decoder import Layer, Wanted, chosen, own_rows
from quire.model.net.parts import Embed, Linear, LowRank, Mlp, Norm, Product
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.layout import LayerCache


@dataclass(frozen=True)
class Adapted:
    """What `own`, which layers share, makes, and what this layer adds to it: `parts`, side by side."""

    own: Linear
    parts: tuple[LowRank, ...]

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, k] -> [T, n]."""
        y, added = self.own(ops, x), tuple(part(ops, x) for part in self.parts)
        return ops.add(y, added[0] if len(added) == 1 else ops.join_columns(added))


def adapted(own: Linear, parts: tuple[LowRank, ...]) -> Product:
    """`own`, with `parts` where a layer has any."""
    return Adapted(own, parts) if parts else own


@dataclass(frozen=True)
class SharedAttention:
    """What runs in a layer that is a use of a block: attention over the stream beside the embedded tokens, and an MLP.

    The layer's `qkv` reads the norm of both, [T, 2 * hidden]. Tokens are looked up again, so that a stream need not
    carry them. The layer's `o` is what leads back to the stream.
    """

    embed: Embed
    norm: Norm
    o: Linear
    mlp_norm: Norm
    mlp: Mlp

    def __call__(self, ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
        """h [T, hidden], not normed -> [R, hidden]; keys and values of all rows are written to `cache`."""
        both = self.norm(ops, ops.join_columns((h, self.embed(ops, batch.tokens))))
        qkv = own_rows(ops, layer, both, batch, cache)
        found = ops.attention(qkv, cache[0], batch.cu_q, batch.context, batch.block_tables, layer.attend, batch.tree)
        attended = self.o(ops, chosen(ops, found, wanted))
        return layer.o(ops, self.mlp(ops, self.mlp_norm(ops, attended)))
